"""What a step costs by what it holds: rows that decode, and prompt tokens beside them.

The input of `perf.simulate.schedule`.

    python -m perf.simulate.step_costs CHECKPOINT --json costs.jsonl [--rows 0 8 64] [--prompt 0 512] [--drafts 0 4] \\
        --set load_format=dummy

Rows have computed `--context` tokens of their own, drawn at random, since experts and caches go by what is in them.
Prompts are new in each step, of at most `--length` tokens each. Drafts are those of each row, where there is no prompt,
and do not stand. Steps are launched one ahead, as by the loop.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.cache.writes import BlockWrite
from engine.config import MAX_DRAFTS
from engine.core.plan import Draft, Pending, RowStart, Runner, StepPlan
from perf.bench.engine import config_from
from perf.provenance import provenance
from perf.rows import GREEDY, own_blocks, own_slot

ROWS = (0, 1, 8, 32, 64, 128, 248)
PROMPT = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
WARM, LEAST, MOST, SECONDS = 2, 4, 40, 0.25


@dataclass(frozen=True)
class Cost:
    """Of one kind of step: median ms from one to the next, and of the host's part, the launch.

    rows decode behind `context` tokens, each with `drafts` drafts; `prompt` tokens are computed in `chunks` entries.
    """

    rows: int
    context: int
    prompt: int
    chunks: int
    step_ms: float
    launch_ms: float
    drafts: int = 0


class Steps:
    """Plans over a pool of which each row has its own blocks, where there are enough of them. Rows from the last down
    take prompts, the others decode."""

    def __init__(self, runner: Runner, max_rows: int, budget: int, context: int, length: int) -> None:
        self._runner, self._max_rows, self._budget, self._context = runner, max_rows, budget, context
        self._pool = runner.info.pool
        self.length = length
        self._draw = np.random.default_rng(0)
        self._vocab = runner.info.vocab_size
        self._step = 0
        self._entries = -(-(max(context + WARM + MOST + MAX_DRAFTS, length) + 1) // self._pool.block_size)

    def _start(self, row: int, tokens: int) -> RowStart:
        ids = self._draw.integers(self._vocab, size=tokens).tolist()
        return RowStart(row, ids, tokens, GREEDY, state_slot=own_slot(self._pool, row))

    def _writes(self, row: int) -> list[BlockWrite]:
        return own_blocks(self._pool, row, self._entries)

    def plan(self, rows: int, at: int, chunks: list[int], drafts: int = 0) -> StepPlan:
        """A step of `rows` rows at position `at` with so many drafts each, and new prompts of `chunks` tokens."""
        self._step += 1
        used = [self._max_rows - 1 - i for i in range(len(chunks))]
        starts = [self._start(row, count) for row, count in zip(used, chunks, strict=True)]
        writes = [write for row in used for write in self._writes(row)]
        first = [at] * rows + [0] * len(chunks)
        entries = [*range(rows), *used]
        tokens = self._draw.integers(self._vocab, size=(rows, drafts)).tolist()
        drafted = {row: Draft(drafts, at + 1, tokens[row]) for row in range(rows)} if drafts else {}
        counts = [1 + drafts] * rows + chunks
        return StepPlan(self._step, entries, first, counts, [True] * len(entries), starts, writes, drafts=drafted)

    def fill(self, rows: int) -> None:
        """Compute the context of the first `rows` rows."""
        many = max(1, self._budget // self._context)
        for begin in range(0, rows, many):
            held = list(range(begin, min(rows, begin + many)))
            self._step += 1
            starts = [self._start(row, self._context) for row in held]
            writes = [write for row in held for write in self._writes(row)]
            zeros, counts = [0] * len(held), [self._context] * len(held)
            self._runner.launch(StepPlan(self._step, held, zeros, counts, [True] * len(held), starts, writes)).wait()

    def cost(self, rows: int, prompt: int, drafts: int = 0) -> Cost:
        """Measure steps of `rows` rows with `drafts` drafts each beside `prompt` tokens in chunks of up to `length`."""
        chunks = [min(self.length, prompt - at) for at in range(0, prompt, self.length)]
        done, launches = [], []

        def launch(i: int) -> Pending:
            plan = self.plan(rows, self._context + i, chunks, drafts)
            began = time.perf_counter()
            pending = self._runner.launch(plan)
            launches.append(time.perf_counter() - began)
            return pending

        pending = launch(0)
        began = time.perf_counter()
        for i in range(1, WARM + MOST):
            ahead = launch(i)
            pending.wait()
            pending = ahead
            done.append(time.perf_counter())
            if i == WARM:
                began = done[-1]
            if i >= WARM + LEAST and done[-1] - began > SECONDS:
                break
        pending.wait()
        done.append(time.perf_counter())
        times = [after - before for before, after in zip(done[WARM - 1 :], done[WARM:], strict=False)]
        return Cost(
            rows,
            self._context,
            prompt,
            len(chunks),
            round(1e3 * statistics.median(times), 4),
            round(1e3 * statistics.median(launches[WARM:]), 4),
            drafts,
        )


def measure(
    runner: Runner,
    max_rows: int,
    budget: int,
    context: int,
    length: int,
    rows: list[int],
    prompts: list[int],
    drafts: Sequence[int] = (0,),
) -> list[Cost]:
    """The costs of all pairs of `rows` and `prompts` that fit a step, and of `rows` and `drafts`. The last rows are
    kept for prompts."""
    steps = Steps(runner, max_rows, budget, context, length)
    steps.fill(max(rows))
    costs = []
    for count in rows:
        for prompt in dict.fromkeys(min(tokens, budget - count) for tokens in prompts):
            if count + -(-prompt // length) > max_rows or not count + prompt:
                continue
            for depth in drafts if count and not prompt else (0,):
                if count * (1 + depth) <= budget:
                    costs.append(steps.cost(count, prompt, depth))
                    print(costs[-1], flush=True)
    return costs


def read(file: Path) -> list[Cost]:
    """The costs of a file that `publish` wrote; those of an older one without drafts. The last of each kind counts."""
    names = Cost.__dataclass_fields__
    costs = [json.loads(line) for line in file.read_text().splitlines()]
    return [Cost(**{name: cost[name] for name in names if name in cost}) for cost in costs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--json", type=Path, required=True, help="append the costs to this file")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--prompt", type=int, nargs="*", default=list(PROMPT), help="prompt tokens of a step")
    parser.add_argument("--drafts", type=int, nargs="*", default=[0], help="drafts of each row; needs speculation.*")
    parser.add_argument("--context", type=int, default=1088)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    args = parser.parse_args()
    from engine.parallel.ranks import open_runner

    config = config_from(args.model, args.set)
    runner = open_runner(config)[0]
    gc.collect()
    gc.freeze()
    limits = (config.scheduler.max_rows, config.scheduler.token_budget)
    costs = measure(runner, *limits, args.context, args.length, args.rows, args.prompt, args.drafts)
    publish(costs, args.model, args.set, args.json)
    runner.close()


def publish(costs: list[Cost], model: str, settings: list[str], file: Path) -> None:
    """Append one JSON line a cost, with its provenance."""
    common: dict[str, Any] = {"model": Path(model).name, "settings": settings, **provenance()}
    with file.open("a") as out:
        for cost in costs:
            out.write(json.dumps({**asdict(cost), **common}) + "\n")


if __name__ == "__main__":
    main()
