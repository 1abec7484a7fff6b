"""Which kernels a model's steps need, recorded on a CPU: launches are looked up as Triton would, and not run.

    python -m tests.runner.variants CHECKPOINT STEPS SEED [deterministic] [drafts] [ranks] [budgets]

Prints, as JSON, how many variants the warm-up compiles and those that STEPS random steps need besides: none, or
serving would stop to compile them. It must have a process of its own, whose Triton is not the interpreter.
"""

from __future__ import annotations

import json
import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernels.hardware
from engine.cache.writes import BlockWrite
from engine.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.core.plan import Draft, RowStart, StepPlan
from engine.parallel.communicator import Communicator
from engine.runner import build
from engine.runner.graphs import Compute, Replay
from engine.runner.inputs import StepShape
from engine.runner.pending import ComputedStep
from engine.runner.runner import DeviceRunner
from engine.runner.warmup import warmup_steps
from engine.types import SamplingParams
from kernels.compilation.ahead import Zeroed
from kernels.registry import registry
from kernels.workspace import Workspace

ROWS, BUDGET, CONTEXT = 256, 5120, 8192
BLOCK = 16
DRAFTS = 5
HOPPER = make_backend(GPUTarget("cuda", 90, 32))


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages the system makes when they are touched, which those of scratch memory never are."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(max(1, size), np.uint8))[:size].view(dtype).view(shape)


class Unmultiplied(Zeroed):
    """Within, torch's products are zeros as well: their values do not matter, and they would take minutes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._makers:
            made = func(*args, **{**(kwargs or {}), "device": "meta"})
            return lazy_zeros(made.shape, made.dtype)
        if func is torch.nn.functional.linear:
            return lazy_zeros((*args[0].shape[:-1], args[1].shape[0]), args[0].dtype)
        if func is torch._scaled_mm and kwargs:
            return lazy_zeros((args[0].shape[0], args[1].shape[1]), kwargs["out_dtype"])
        if func in (torch.addmm, torch.bmm) and kwargs and "out" in kwargs:
            return kwargs["out"].zero_()
        if func is torch.bmm:
            return lazy_zeros((*args[0].shape[:-1], args[1].shape[-1]), args[0].dtype)
        return super().__torch_function__(func, types, args, kwargs)


class Recorder:
    """Takes the place of JITFunction.run."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], str] = {}
        self._binders: dict[int, Any] = {}

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        options["debug"] = False
        binder = self._binders.get(id(function))
        if binder is None:
            binder = self._binders[id(function)] = create_function_from_signature(
                function.signature, function.params, HOPPER
            )
        _, specialization, rest = binder(*args, **options)
        names = [parameter.name for parameter in function.params]
        found = str([(name, *value) for name, value in zip(names, specialization, strict=True)])
        self.seen.setdefault((function.__name__, found + str(rest)), found)


class Echo(Communicator):
    """The first of two ranks, of which the other says the same."""

    size = 2

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, x))

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        return [numbers, numbers]


def make(
    folder: str,
    deterministic: bool = False,
    drafts: int = 0,
    communicator: Communicator | None = None,
    budgets: bool = False,
) -> DeviceRunner:
    """A runner whose ops are kernels, as on an H200, though its tensors stand on the CPU. budgets: with graphs of whole
    budgets."""
    kernels.hardware.multiprocessors = lambda device: 132  # type: ignore[assignment]
    kernels.hardware.dependent_launch = lambda device: True  # type: ignore[assignment]
    kernels.hardware.bulk_copies = lambda device: True  # type: ignore[assignment]
    kernels.hardware.group_products = lambda device: True  # type: ignore[assignment]

    def select(workspace: Workspace, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(**{op.name: op.bound(workspace) for op in registry()})

    build.select = select  # type: ignore[assignment]
    return build.build_runner(
        EngineConfig(
            model=folder,
            load_format="dummy",
            max_model_len=CONTEXT,
            scheduler=SchedulerConfig(max_rows=ROWS, token_budget=BUDGET),
            cache=CacheConfig(num_blocks=2 * CONTEXT // BLOCK, block_size=BLOCK),
            runtime=RuntimeConfig(device="cpu", deterministic=deterministic, budget_graphs=budgets),
            speculation=SpeculationConfig(method="ngram", tokens=drafts) if drafts else SpeculationConfig(),
            parallel=ParallelConfig(tensor=1 if communicator is None else communicator.size),
        ),
        communicator=communicator,
    )


def plan(draw: random.Random, step: int, keeps_state: bool, most: int = 0) -> StepPlan:
    """Random entries of random rows: their content does not matter. In half the steps longer entries draft, `most`
    tokens at most."""
    singles = draw.choice((0, 0, 1, 2, 5, 30, draw.randint(0, ROWS - 30)))
    longer = (
        draw.choice((0, 0, 1, 1, 2, draw.randint(1, 30))) if singles else draw.choice((1, 1, 2, draw.randint(1, 30)))
    )
    drafted = bool(most) and draw.random() < 0.5
    if drafted:
        longer = draw.choice((1, 2, 5, draw.randint(1, 30), draw.randint(1, ROWS - singles)))
    rows = draw.sample(range(ROWS), singles + longer)
    left = BUDGET - singles
    count, first = [1] * singles, []
    for i in range(longer):
        upto = max(2, min(left - 2 * (longer - i), draw.choice((6, 40, 700, 2048, 5120))))
        count.append(draw.randint(2, 1 + most if drafted else upto))
        left -= count[-1]
    deepest = draw.choice((30, 300, CONTEXT))
    first = [draw.randint(0, max(0, min(deepest, CONTEXT - n))) for n in count]
    asks = draw.random()
    params = SamplingParams(
        temperature=1.0,
        seed=step,
        top_p=0.9 if draw.random() < 0.3 else 1.0,
        max_tokens=8,
        presence_penalty=0.5 if 0.8 < asks < 0.9 else 0.0,
        logprobs=draw.randint(0, 20) if asks > 0.85 else None,
        prompt_logprobs=draw.randint(0, 20) if 0.75 < asks < 0.8 else None,
        logit_bias={5: 1.0} if 0.7 < asks < 0.75 else {},
    )
    starts = [
        RowStart(row, [1] * (at + n), at + n, params, state_slot=1 + i if keeps_state else 0)
        for i, (row, at, n) in enumerate(zip(rows, first, count, strict=True))
    ]
    drafts = {i: Draft(n - 1, 1, [1]) for i, n in enumerate(count) if n > 1} if drafted else {}
    writes = [BlockWrite(0, rows[0], 0, [1, 2])]
    return StepPlan(step, rows, first, count, [True] * len(rows), starts, writes, drafts=drafts)


def main() -> None:
    folder, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    recorder = Recorder()
    JITFunction.run = lambda self, *args, **options: recorder.run(self, *args, **options)  # type: ignore[method-assign]
    drafts = DRAFTS if "drafts" in sys.argv[4:] else 0
    modes = sys.argv[4:]
    runner = make(
        folder, "deterministic" in modes, drafts, Echo() if "ranks" in modes else None, budgets="budgets" in modes
    )
    with Unmultiplied():
        # As on a GPU: what takes a step there is a kernel, which is not run.
        staged = runner._inputs._words
        runner._inputs._words = torch.zeros_like(staged)
        for warmup_step in warmup_steps(ROWS, BUDGET, CONTEXT, drafts, runner.decoder.vocabulary.merges):
            runner.run_warmup_step(warmup_step)
        runner._inputs._words = staged
        ahead = set(recorder.seen)

        def capture(compute: Compute, shape: StepShape) -> Replay:
            def replay() -> ComputedStep:
                return compute(shape)

            return replay

        runner.use_graphs(capture)
        late: dict[tuple[str, str], str] = {}
        graphs = 0
        while (shape := runner.graphs and runner.graphs.next_shape) is not None:
            assert shape
            runner.make_graph(shape)
            graphs += 1
            late |= {key: f"graph {shape}" for key in recorder.seen if key not in ahead and key not in late}
        draw = random.Random(seed)
        keeps_state = bool(runner.info.pool.num_state_slots)
        for step in range(steps):
            made = plan(draw, step, keeps_state, drafts)
            runner.launch(made)
            what = f"counts {sorted(set(made.count))} of {len(made.rows)} entries, deepest {max(made.first)}"
            late |= {key: what for key in recorder.seen if key not in ahead and key not in late}
    names = sorted({name for name, _ in ahead})
    counts = {name: sum(1 for key in ahead if key[0] == name) for name in names}
    print(
        json.dumps(
            {"ahead": counts, "graphs": graphs, "late": [[name, key, what] for (name, key), what in late.items()]}
        )
    )


if __name__ == "__main__":
    main()
