"""What a step consists of: kernel times as a table and one stretch of steps as a Chrome trace, with named ranges.

    python -m perf.profile CHECKPOINT --rows 1 8 64 --context 512 [--trace FOLDER] [--set KEY=VALUE]
    python -m perf.profile CHECKPOINT --prompt 1024 8x1024         prompts instead of decode steps
    python -m perf.profile CHECKPOINT --rows 1 --drafts 4 --set speculation.method=mtp     drafted steps

Steps are given to the runner directly, launched one ahead as the engine's loop does, over a pool whose contents are
arbitrary. Open the trace in chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.core.plan import Draft, Pending, RowStart, Runner, StepPlan
from engine.parallel.ranks import open_runner
from perf.bench.engine import config_from
from perf.provenance import provenance
from perf.rows import GREEDY, own_blocks, own_slot

# Categories of a trace's events that run on the device.
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Rows:
    """Rows that decode, each with `context` tokens in blocks of its own (shared where the pool is too small) and
    `drafts` drafts in each step."""

    def __init__(self, runner: Runner, rows: int, context: int, steps: int, drafts: int = 0) -> None:
        pool = runner.info.pool
        entries = -(-(context + steps * (1 + drafts) + 2) // pool.block_size)
        self._rows, self._next, self._step, self._drafts = rows, context, 1, drafts
        starts = [
            RowStart(row, [7 + row] * (context + 1), context + 1, GREEDY, state_slot=own_slot(pool, row))
            for row in range(rows)
        ]
        writes = [write for row in range(rows) for write in own_blocks(pool, row, entries)]
        self._first = (starts, writes)

    def plan(self) -> StepPlan:
        starts, writes = self._first
        self._first = ([], [])
        rows, count = list(range(self._rows)), 1 + self._drafts
        drafted = {row: Draft(self._drafts, self._next + 1, [11 + row] * self._drafts) for row in rows}
        plan = StepPlan(
            self._step, rows, [self._next] * self._rows, [count] * self._rows, [True] * self._rows, starts, writes,
            drafts=drafted if self._drafts else {},
        )  # fmt: skip
        self._next += 1
        self._step += 1
        return plan


def run(runner: Runner, rows: Rows, steps: int) -> float:
    """Seconds a step takes when each is launched before the one before it is waited for."""
    before: Pending = runner.launch(rows.plan())
    pending = runner.launch(rows.plan())
    before.wait()
    began = time.perf_counter()
    for _ in range(steps - 1):
        with record_function("launch"):
            ahead = runner.launch(rows.plan())
        with record_function("wait"):
            pending.wait()
        pending = ahead
    pending.wait()
    return (time.perf_counter() - began) / steps


def host_time(runner: Runner, rows: Rows, steps: int) -> float:
    """Seconds of host work to launch a step."""
    spent = 0.0
    for _ in range(steps):
        plan = rows.plan()
        began = time.perf_counter()
        pending = runner.launch(plan)
        spent += time.perf_counter() - began
        pending.wait()
    return spent / steps


class Prompts:
    """Prompts of `tokens` each, `rows` of them side by side, in steps of at most `budget` tokens a step."""

    def __init__(self, runner: Runner, rows: int, tokens: int, budget: int) -> None:
        self._pool = runner.info.pool
        self._rows, self._tokens, self._chunk = rows, tokens, max(1, budget // rows)
        self._made = 0

    def plans(self) -> list[StepPlan]:
        """The steps of a fresh set of prompts."""
        pool, rows = self._pool, list(range(self._rows))
        entries = -(-(self._tokens + 1) // pool.block_size)
        starts = []
        for row in rows:
            ids = [(11 * (self._made + row) + j) % 9000 for j in range(self._tokens)]
            starts.append(RowStart(row, ids, self._tokens, GREEDY, state_slot=own_slot(pool, row)))
        writes = [write for row in rows for write in own_blocks(pool, row, entries)]
        made = []
        for first in range(0, self._tokens, self._chunk):
            count = min(self._chunk, self._tokens - first)
            last = first + count == self._tokens
            changes = ([], []) if first else (starts, writes)
            n = self._rows
            made.append(StepPlan(self._made, rows, [first] * n, [count] * n, [last] * n, *changes))
            self._made += 1
        return made


def prompt_time(runner: Runner, prompts: Prompts, repeats: int) -> float:
    """Median seconds from the launch of prompts on an idle GPU to their first tokens."""
    times = []
    for _ in range(repeats + 2):
        plans = prompts.plans()
        began = time.perf_counter()
        with record_function("prompt"):
            for pending in [runner.launch(plan) for plan in plans]:
                pending.wait()
        times.append(time.perf_counter() - began)
    return sorted(times[2:])[repeats // 2]


def burst_time(runner: Runner, prompts: Prompts, repeats: int) -> float:
    """Seconds that a set of prompts takes behind others, each step launched while the one before it runs."""
    plans = [plan for _ in range(repeats + 1) for plan in prompts.plans()]
    per_set = len(plans) // (repeats + 1)
    pending: list[Pending] = []
    began = 0.0
    for i, plan in enumerate(plans):
        if i == per_set + 1:
            began = time.perf_counter()
        pending.append(runner.launch(plan))
        if i:
            pending[i - 1].wait()
    pending[-1].wait()
    # from the end of the first set to the end of the last
    return (time.perf_counter() - began) / repeats


def kernel_table(trace: Path, steps: int) -> list[tuple[str, float, float]]:
    """(kernel, launches a step, microseconds a step) by falling time, from a Chrome trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    count: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in DEVICE:
            name = event["name"][:70]
            count[name] += 1
            spent[name] += event["dur"]
    return sorted(((n, count[n] / steps, spent[n] / steps) for n in count), key=lambda row: -row[2])


def report(label: str, trace: Path, steps: int, shown: int) -> None:
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") in DEVICE]
    if events:
        first, last = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
        gaps = idle(events)
        print(
            f"{label}: kernels span {(last - first) / steps:.1f} us a step; the GPU idles {sum(gaps) / steps:.1f} of "
            f"them in {len(gaps) / steps:.1f} gaps, the longest {max(gaps, default=0.0):.1f}"
        )
    for name, launches, spent in kernel_table(trace, steps)[:shown]:
        print(f"    {spent:9.1f} us  {launches:6.1f} x  {name}")


def idle(events: list[dict[str, Any]]) -> list[float]:
    """Microseconds of each stretch between the first and the last device event in which none ran."""
    gaps, busy_until = [], None
    for event in sorted(events, key=lambda e: float(e["ts"])):
        if busy_until is not None and event["ts"] > busy_until:
            gaps.append(event["ts"] - busy_until)
        busy_until = max(busy_until or 0.0, event["ts"] + event["dur"])
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--rows", type=int, nargs="*", default=[])
    parser.add_argument("--context", type=int, nargs="*", default=[512])
    parser.add_argument("--drafts", type=int, default=0, help="of each row that decodes; needs speculation.*")
    parser.add_argument("--prompt", nargs="*", default=[], metavar="TOKENS or COUNTxTOKENS")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces; also prints the kernels")
    parser.add_argument("--shown", type=int, default=14, help="kernels to print")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    config = config_from(args.model, args.set)
    budget = config.scheduler.token_budget
    runner = open_runner(config)[0]
    gc.collect()
    gc.freeze()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    work = [("decode", rows, context) for context in args.context for rows in args.rows]
    for text in args.prompt:
        count, _, tokens = text.rpartition("x")
        work.append(("prompt", int(count or 1), int(tokens)))
    for kind, rows, size in work:
        figures: dict[str, Any] = {"kind": kind, "rows": rows, "tokens": size}
        label = f"{kind} rows {rows} tokens {size}"
        if kind == "decode":
            figures["drafts"] = args.drafts
            run(runner, Rows(runner, rows, size, 5, args.drafts), 5)
            timed = Rows(runner, rows, size, args.steps, args.drafts)
            figures["step_ms"] = round(run(runner, timed, args.steps) * 1e3, 4)
            figures["host_ms"] = round(host_time(runner, Rows(runner, rows, size, 20, args.drafts), 20) * 1e3, 4)
        else:
            fresh = Prompts(runner, rows, size, budget)
            figures["step_ms"] = round(prompt_time(runner, fresh, 7) * 1e3, 4)
            figures["burst_ms"] = round(burst_time(runner, fresh, 8) * 1e3, 4)
        print(label, figures, flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"model": args.model, "settings": args.set, **figures, **provenance()}) + "\n")
        if args.trace:
            args.trace.mkdir(parents=True, exist_ok=True)
            file_name = args.trace / f"{kind}-{rows}-{size}.json"
            steps = 4
            state = Rows(runner, rows, size, steps + 2, args.drafts) if kind == "decode" else None
            with profile(activities=activities) as profiler:
                if state is not None:
                    run(runner, state, steps)
                else:
                    prompt_time(runner, Prompts(runner, rows, size, budget), steps - 2)
            profiler.export_chrome_trace(str(file_name))
            report(label, file_name, steps + (kind == "decode"), args.shown)
    runner.close()


if __name__ == "__main__":
    main()
