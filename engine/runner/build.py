"""From an EngineConfig to a runner: read the config, build the decoder, load its weights, size and allocate the pools."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.cache.tensors import CacheTensors
from engine.config import EngineConfig
from engine.core.plan import RunnerInfo, StepPlan
from engine.layers.build import Build
from engine.models import registry
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.reader import ConfigError
from engine.runner.memory import LEAST_BLOCKS, free_bytes, size_pools
from engine.runner.runner import DeviceRunner
from engine.weights import dummy, loader
from engine.weights.checkpoint import Checkpoint
from kernels import select

# Called with (what is being done, how much of it is done, how much there is).
Progress = Callable[[str, int, int], None]


def build_runner(config: EngineConfig, progress: Progress | None = None) -> DeviceRunner:
    """Everything between a checkpoint folder and a runner that takes plans.

    Raises ConfigError, WeightsError or ValueError, each with a sentence for the user.
    """
    model, family = registry.load(config.model)
    device = _device(config)
    dtype = getattr(torch, model.dtype if config.runtime.dtype == "auto" else config.runtime.dtype)
    if config.runtime.deterministic:
        raise ConfigError("runtime.deterministic is not implemented yet: leave it off")
    ops = select(device, config.runtime.kernels)
    build = Build(ops, model, dtype, device, _max_model_len(config, model))
    decoder = Decoder(build)
    decoder.materialize(device)
    parameters = dict(decoder.named_parameters())
    if config.load_format == "dummy":
        dummy.fill(parameters, model.hidden, model.norm.offset)
    else:
        unused = ("lm_head.weight",) if model.tied else ()
        report = None if progress is None else lambda done, total: progress("weights", done, total)
        loader.load(parameters, Checkpoint.open(config.model), family.rules(model), unused, report)
    return _with_pools(config, build, decoder)


def _with_pools(config: EngineConfig, build: Build, decoder: Decoder) -> DeviceRunner:
    scheduler = config.scheduler

    def runner(cache_bytes: int, num_blocks: int | None) -> DeviceRunner:
        cache = config.cache if num_blocks is None else _with_blocks(config, num_blocks)
        pool = size_pools(decoder.specs, cache, scheduler, build.max_model_len, cache_bytes)
        info = RunnerInfo(pool, build.config.vocab_size, build.max_model_len, build.config.eos_ids)
        caches = CacheTensors(pool, len(decoder.layers), build.dtype, build.device)
        return DeviceRunner(
            decoder, caches, info, build.ops, scheduler.max_rows, scheduler.token_budget, build.device
        )

    activations = 0
    if build.device.type == "cuda" and config.cache.num_blocks is None:
        activations = _profile(runner(0, LEAST_BLOCKS), config, build)
    return runner(free_bytes(build.device, config.cache, activations), None)


def _with_blocks(config: EngineConfig, num_blocks: int):  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(config.cache, num_blocks=num_blocks)
