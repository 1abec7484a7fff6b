"""From an EngineConfig to a runner: build the decoder, load weights, allocate the pools."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from engine import env, heap
from engine.cache.spec import LayerSpec, PoolSpec
from engine.cache.tensors import CacheTensors
from engine.config import MIN_BLOCKS, CacheConfig, EngineConfig, SchedulerConfig
from engine.core.plan import Draft, RowStart, RunnerInfo, StepPlan
from engine.layers.build_context import BuildContext
from engine.models import registry
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.draft_heads import DraftHead
from engine.models.reader import ConfigError
from engine.parallel.communicator import Communicator
from engine.parallel.peers import reached
from engine.parallel.slices import agreed, check_parallel
from engine.quant import device as quant_device
from engine.quant import plan as quant
from engine.runner import draft_build, model_source, threads
from engine.runner.budget_graphs import makes_budget_graphs
from engine.runner.graphs import Capture, CudaCapture
from engine.runner.memory import free_bytes, size_pools
from engine.runner.model_source import ModelSource
from engine.runner.runner import DeviceRunner
from engine.runner.warmup import warmup_steps
from engine.types import MAX_LOGPROBS, SamplingParams
from engine.weights import dummy, loader
from kernels.compilation.ahead import Compiler, Elsewhere
from kernels.compilation.watch import CompileWatch
from kernels.select import Ops, select
from kernels.workspace import Workspace

# Compilations at once: each holds 100 MB.
MAX_COMPILERS = 32

# Called with (what is being done, how much of it is done, how much there is).
Progress = Callable[[str, int, int], None]


def build_runner(
    config: EngineConfig,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
    communicator: Communicator | None = None,
) -> DeviceRunner:
    """Everything between a checkpoint folder and a runner that takes plans. `elsewhere` compiles kernels in other
    processes. communicator: the ranks that share the model, of which this is one; None is the only one.

    Raises ConfigError, WeightsError or ValueError, each with a sentence for the user.
    """
    if progress is not None:
        progress("model", 0, 0)
    model, family = registry.load(config.model)
    device = device_of(config)
    communicator = communicator or Communicator()
    check_parallel(config, model, communicator)
    watch = CompileWatch().install() if device.type == "cuda" else None
    runtime = config.runtime
    workspace = Workspace(device, runtime.dependent_launch, runtime.tuned_gemms, config.weights.fast_accumulation)
    ops = select(workspace, runtime.kernels, runtime.direct_copies)
    if runtime.deterministic:
        communicator = communicator.in_order()
    if config.parallel.all_reduce != "library":
        communicator = reached(communicator, ops, device, config.parallel.all_reduce == "peer")
    max_model_len = _max_model_len(config, model)
    source = model_source.read(config, model, family, communicator, device)
    build = _build_context(config, source, ops, device, max_model_len, communicator)
    decoder = Decoder(build)
    budgets = makes_budget_graphs(config, build, decoder)
    load = _planned_load(config, source, decoder, build, progress)
    decoder.materialize(device)
    draft = draft_build.prepare(config, build, decoder, source.target)
    drafter = None if draft is None else draft.module

    def fill() -> None:
        if draft is not None:
            draft.fill()
        load()

    if device.type == "cuda":
        runner = _on_gpu(config, build, workspace, decoder, drafter, budgets, fill, watch, progress, elsewhere)
    else:
        threads.choose(decoder.num_bytes, env.read().threads)
        fill()
        room = free_bytes(device, config.cache, 0)
        pool = _pool(config, config.cache, build, _specs(decoder, drafter), room)
        runner = _runner(config, build, decoder, drafter, budgets, agreed(pool, communicator))
    heap.freeze()
    _capture_first(runner, progress)
    if watch is not None:
        watch.arm()
    return runner


def _build_context(
    config: EngineConfig,
    source: ModelSource,
    ops: Ops,
    device: torch.device,
    max_model_len: int,
    communicator: Communicator,
) -> BuildContext:
    """What layers of that model are built with, by the settings."""
    runtime, parallel = config.runtime, config.parallel
    return BuildContext(
        ops,
        source.config,
        source.dtype,
        device,
        max_model_len,
        deterministic=runtime.deterministic,
        fused_attention=runtime.fused_attention,
        router_dtype=source.router_dtype,
        cache_scales=source.scales,
        communicator=communicator,
        drafts=config.speculation.most,
        sliced_context=parallel.block_shares > 1,
        merge_candidates=parallel.merge_candidates,
    )


def _planned_load(
    config: EngineConfig, source: ModelSource, decoder: Decoder, build: BuildContext, progress: Progress | None
) -> Callable[[], None]:
    """Give the decoder's weights the formats of their sources; returns what fills them once they have memory. What
    does not fit is named before memory is asked for."""
    checkpoint, model, unused, copies = source.checkpoint, source.config, source.unused, source.copies
    spare = quant.spare_biases(source.rules, checkpoint)
    asked = (config.weights.activations, config.weights.quantize)
    rules = quant.plan(decoder.weights, source.rules, checkpoint, source.method, *asked)
    rules = [rule.bound(build.ops) for rule in rules]
    quant_device.check_weights(decoder.weights, build.device)
    if checkpoint is None:
        return lambda: dummy.fill(decoder.others, decoder.weights, decoder.bounds, model.hidden, model.norm.offset)
    loader.plan(dict(decoder.named_parameters()), checkpoint, rules, unused, (*copies, *spare))

    def load() -> None:
        report = None if progress is None else lambda done, total: progress("weights", done, total)
        parameters = dict(decoder.named_parameters())
        loader.load(parameters, checkpoint, rules, unused, copies, report, decoder.bounds, spare)
        for name, weight in decoder.weights.items():
            weight.check(name)

    return load


def _on_gpu(
    config: EngineConfig,
    build: BuildContext,
    workspace: Workspace,
    decoder: Decoder,
    drafter: Decoder | DraftHead | None,
    budgets: bool,
    fill: Callable[[], None],
    watch: CompileWatch | None,
    progress: Progress | None,
    elsewhere: Elsewhere | None,
) -> DeviceRunner:
    """Compile the kernels of steps while `fill` reads the weights, size the pools by what is free once a largest
    step has run, and put a runner over them."""
    few = replace(config.cache, num_blocks=MIN_BLOCKS)
    specs = _specs(decoder, drafter)
    small = _runner(config, build, decoder, drafter, budgets, _pool(config, few, build, specs, 0))
    limits = (config.scheduler.max_rows, config.scheduler.token_budget, build.max_model_len)
    steps = warmup_steps(*limits, config.speculation.most, decoder.vocabulary.merges)
    report = progress or (lambda stage, done, total: None)
    report("launches", 0, 0)
    ahead = config.runtime.compile_ahead != "off"
    with Compiler(min(len(os.sched_getaffinity(0)), MAX_COMPILERS), elsewhere) as compiler:
        if ahead and config.runtime.kernels != "reference":
            with compiler.only(workspace):
                for step in steps:
                    small.run_warmup_step(step)
        report("weights", 0, 0)
        fill()
        report("kernels", 0, 0)
    report("memory", 0, 0)
    activations = _profile(small, config, build) if config.cache.num_blocks is None else 0
    small.close()
    # Graphs hold a step's memory beside that of steps that are launched.
    room = free_bytes(build.device, config.cache, activations * (2 if budgets else 1))
    pool = _pool(config, config.cache, build, specs, room)
    capture = CudaCapture(build.device) if config.runtime.graphs else None
    runner = _runner(config, build, decoder, drafter, budgets, agreed(pool, build.communicator), capture, watch)
    report("warm-up", 0, 0)
    if ahead:
        for step in steps:
            if step.brief:
                runner.run_warmup_step(step)
    return runner


def _capture_first(runner: DeviceRunner, progress: Progress | None) -> None:
    """Make the graphs that the first requests need. This also compiles the kernels of decode steps."""
    shapes = [] if runner.graphs is None else runner.graphs.first_shapes
    for done, shape in enumerate(shapes):
        runner.make_graph(shape)
        if progress is not None:
            progress("graphs", done + 1, len(shapes))


def _runner(
    config: EngineConfig,
    build: BuildContext,
    decoder: Decoder,
    drafter: Decoder | DraftHead | None,
    budgets: bool,
    pool: PoolSpec,
    capture: Capture | None = None,
    watch: CompileWatch | None = None,
) -> DeviceRunner:
    """A runner over `pool`, whose last layers' caches are the drafter's. budgets: as `makes_budget_graphs` has it."""
    limits_of = (build.config.vocab_size, build.max_model_len, build.config.eos_ids)
    info = RunnerInfo(pool, *limits_of, decoder.active, weight_bits=decoder.weight_bits)
    caches = CacheTensors(pool, len(_specs(decoder, drafter)), build.dtype, build.device)
    scheduler = config.scheduler
    limits = (scheduler.max_rows, scheduler.token_budget)
    return DeviceRunner(
        decoder,
        caches,
        info,
        build.ops,
        *limits,
        build.device,
        capture,
        watch,
        config.runtime.trim_last_layer,
        config.speculation.most,
        drafter,
        budgets,
    )


def _pool(
    config: EngineConfig,
    cache: CacheConfig,
    build: BuildContext,
    specs: Sequence[tuple[LayerSpec, ...]],
    room: int,
) -> PoolSpec:
    """This rank's pools within `room` bytes."""
    shares = (build.communicator.rank, build.communicator.size) if build.sliced_context else (0, 1)
    return size_pools(specs, cache, config.scheduler, build.max_model_len, room, *shares)


def _specs(decoder: Decoder, drafter: Decoder | DraftHead | None) -> list[tuple[LayerSpec, ...]]:
    """What the layers keep, those of what drafts behind the others."""
    return decoder.specs + ([] if drafter is None else drafter.specs)


def _profile(runner: DeviceRunner, config: EngineConfig, build: BuildContext) -> int:
    """Bytes that the largest steps need beside weights and pools."""
    torch.cuda.reset_peak_memory_stats(build.device)
    before = torch.cuda.memory_allocated(build.device)
    for drafted in {0, config.speculation.most}:
        runner.launch(largest_step(config.scheduler, build.max_model_len, drafted)).wait()
    peak = torch.cuda.max_memory_allocated(build.device) - before
    return peak


def largest_step(scheduler: SchedulerConfig, longest: int, drafted: int = 0) -> StepPlan:
    """max_rows entries, token_budget tokens, all sampled, from whole logits that are edited, penalised and explained.
    The first entries have `drafted` drafts, as many of them as there are tokens for."""
    rows, drafted = scheduler.max_rows, min(drafted, longest - 1)
    entries = min(rows, (scheduler.token_budget - rows) // drafted) if drafted else 0
    count = [1 + drafted] * entries + [1] * (rows - entries)
    for entry in reversed(range(entries, rows)):
        count[entry] += min(longest - 1, scheduler.token_budget - sum(count))
    asked = {"temperature": 1.0, "top_p": 0.5, "seed": 0, "repetition_penalty": 2.0, "logit_bias": {0: 1.0}}
    all_of_it = SamplingParams(**asked, logprobs=MAX_LOGPROBS)  # type: ignore[arg-type]
    drafts = {entry: Draft(drafted, 1, [0] * drafted) for entry in range(entries)}
    starts = [RowStart(row, [0] * (1 if row in drafts else count[row]), 1, all_of_it) for row in range(rows)]
    return StepPlan(0, list(range(rows)), [0] * rows, count, [True] * rows, starts, drafts=drafts)


def device_of(config: EngineConfig) -> torch.device:
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device is cuda and this machine has no usable CUDA device: use auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_position
    if wanted > model.max_position:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {model.max_position} positions of the checkpoint: lower it, or "
            "extend the model by rope_scaling in its config.json"
        )
    return wanted
