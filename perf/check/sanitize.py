"""Every kernel of the registry under compute-sanitizer: reads and writes outside of tensors, races in shared memory.

    python -m perf.check.sanitize --json perf/results/h200/sanitizer.json
    python -m perf.check.sanitize --tools racecheck --ops linear paged_attention

memcheck runs each small case of an op but those in float16, racecheck the five smallest of each dtype. An op has a
process of its own; inputs are drawn on the CPU and every tensor is an allocation of its own, so that one element past
its end shows. Values are not compared: that is what tests/kernels is for. Exits with 1 when anything was found.

Threads that hold copies of a value each write it to the same place when Triton moves it through shared memory, which
racecheck calls a race. Those are counted apart (`same_value`): what is written is what stood there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels.registry import OPS, Case, Op
from kernels.testing import bound, outputs, seeded
from perf.provenance import provenance

TOOLS = ("memcheck", "racecheck")
FOUND = 86
RACED = 5
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
VALUES = re.compile(r"Current Value\s*:\s*(\S+?),? Incoming Value\s*:\s*(\S+)")


@dataclass(frozen=True)
class Outcome:
    """findings is None when the tool did not come to its summary; `said` holds the end of what it printed then, or the
    first of what it found."""

    op: str
    tool: str
    cases: int
    findings: int | None
    seconds: float
    said: str = ""
    same_value: int = 0

    @property
    def clean(self) -> bool:
        return self.findings == 0 and self.cases > 0


def selected(op: Op, tool: str) -> list[Case]:
    """The cases of an op that a tool runs."""
    small = [case for case in op.cases() if case.small and not case.name.startswith("no ")]
    # float16 is bfloat16's code
    small = sorted((case for case in small if case.dtype != torch.float16), key=lambda case: case.bytes)
    if tool == "memcheck":
        return small
    dtypes = {case.dtype: None for case in small}
    return [case for dtype in dtypes for case in [case for case in small if case.dtype == dtype][:RACED]]


def run_cases(op: Op, tool: str) -> None:
    """Runs in the process that the sanitizer watches."""
    device, cpu = torch.device("cuda"), torch.device("cpu")
    for case in selected(op, tool):
        outputs(bound(op), case, case.make(device, seeded(cpu)))
        torch.cuda.synchronize()


def watch(name: str, tool: str, timeout_s: float) -> Outcome:
    """One op under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    command += (
        ["--print-limit", "3"] if tool == "memcheck" else ["--racecheck-report", "hazard", "--print-limit", "5000"]
    )
    command += [sys.executable, "-m", "perf.check.sanitize", "--watched", name, tool]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        text, status = f"not done after {timeout_s:.0f} s", -1
    summary = SUMMARY.search(text)
    findings = int(summary[1]) if summary and status in (0, FOUND) else None
    same = sum(current == incoming for current, incoming in VALUES.findall(text)) if tool == "racecheck" else 0
    findings = None if findings is None else max(0, findings - same)
    said = "" if findings == 0 else text[:2000] if findings else text[-2000:]
    return Outcome(name, tool, len(selected(Op(name), tool)), findings, round(time.monotonic() - start, 1), said, same)


def version() -> str:
    """Of compute-sanitizer."""
    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout
    return next(iter(re.findall(r"[Vv]ersion ([\d.]+)", said)), "unknown")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, metavar="OP")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="ops that run at once")
    parser.add_argument("--timeout", type=float, default=600, help="seconds an op may take under a tool")
    parser.add_argument("--json", type=Path, help="write outcomes and where they come from to this file")
    parser.add_argument("--watched", nargs=2, metavar=("OP", "TOOL"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.watched:
        run_cases(Op(given.watched[0]), given.watched[1])
        return 0
    if not torch.cuda.is_available():
        parser.error("compute-sanitizer watches kernels on a GPU, and this machine has no usable CUDA device")
    facts = {**provenance(), "compute-sanitizer": version()}
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        running = [pool.submit(watch, op, tool, given.timeout) for tool in given.tools for op in given.ops]
        for done in as_completed(running):
            outcomes.append(o := done.result())
            verdict = "clean" if o.clean else f"{o.findings} findings" if o.findings is not None else "did not finish"
            if o.same_value:
                verdict += f", {o.same_value} writes of one value by several threads"
            print(f"{o.op:<18} {o.tool:<10} {o.cases:>3} cases  {o.seconds:>6.1f} s  {verdict}", flush=True)
            if o.said:
                print(o.said)
            if given.json:
                given.json.write_text(json.dumps({**facts, "outcomes": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    return 0 if all(o.clean for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
