"""Times every op of the registry on the GPU and relates it to what the machine can do.

    python -m perf.kernels [--ops paged_attention sample] [--case decode] [--json FILE] [--base REF] [--compile N]

Each case is captured into a CUDA graph that calls the op over inputs in turn, more of them than the L2 cache holds;
a sample is one replay over its calls. Reported: median, 20th and 80th percentile, GB/s and TFLOP/s from the bytes and
operations a case must move and do, and the floor those allow at the measured copy and matmul rates, as a fraction of
the median. --base REF runs the same cases on another commit, in a git worktree of its own, and prints both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.registry import Case, Op, registry
from kernels.testing import bound, seeded

GRAPH_SECONDS = 1e-3
MAX_CALLS = 200
MAX_INPUTS = 8


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reached: bytes/s of a device-to-device copy (read and written), flop/s of an 8192³ bf16 product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Timing:
    """One case. Times in microseconds; `of_floor` is the floor over the median."""

    op: str
    case: str
    dtype: str
    median: float
    p20: float
    p80: float
    gb_per_s: float
    tflop_per_s: float
    of_floor: float
    graph: bool


def _quantiles(samples: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), cuts[1], cuts[7]


def _seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, by device events."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e-3 for start, stop in events]


def graph_seconds(work: Callable[[], Any], samples: int = 7) -> float:
    """Median seconds of a replay of `work` captured in a CUDA graph; each replay begins on an idle GPU."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    return statistics.median(_seconds(graph.replay, 1)[0] for _ in range(samples))


def ceilings(device: torch.device) -> Ceilings:
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for warm in (lambda: target.copy_(source), lambda: a @ b):
        _seconds(warm, 3)
    copy = statistics.median(_seconds(lambda: target.copy_(source), 10))
    product = statistics.median(_seconds(lambda: a @ b, 20))
    return Ceilings(2 * source.nbytes / copy, 2 * 8192**3 / product)


def _nbytes(inputs: dict[str, Any]) -> int:
    return sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))


def time_case(op: Op, case: Case, device: torch.device, ceiling: Ceilings, samples: int) -> Timing:
    """Times the op's kernel; by events around single calls where it cannot be captured."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    sets = [case.make(device, seeded(device))]
    size = _nbytes(sets[0])
    for seed in range(1, min(MAX_INPUTS, max(2, 1 + 3 * cache // max(size, 1)))):
        sets.append(case.make(device, seeded(device, seed)))
    kernel = bound(op)
    for inputs in sets:
        kernel(**inputs)
    turns = itertools.cycle(sets)
    once = statistics.median(_seconds(lambda: kernel(**next(turns)), 5))
    calls = max(len(sets), min(MAX_CALLS, int(GRAPH_SECONDS / max(once, 1e-6)) // len(sets) * len(sets)))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for inputs in itertools.islice(itertools.cycle(sets), calls):
                kernel(**inputs)
        captured = True
    except RuntimeError:
        torch.cuda.synchronize()
        captured = False
    if captured:
        _seconds(graph.replay, 3)
        taken = [seconds / calls for seconds in _seconds(graph.replay, samples)]
    else:
        taken = _seconds(lambda: kernel(**next(turns)), samples)
    median, p20, p80 = _quantiles(taken)
    floor = max(case.bytes / ceiling.bytes_per_s, case.flops / ceiling.flops_per_s)
    return Timing(
        op.name,
        case.name,
        str(case.dtype).removeprefix("torch."),
        round(median * 1e6, 3),
        round(p20 * 1e6, 3),
        round(p80 * 1e6, 3),
        round(case.bytes / median * 1e-9, 1),
        round(case.flops / median * 1e-12, 2),
        round(floor / median, 3),
        captured,
    )


def _chosen(ops: list[str], word: str, small: bool) -> list[tuple[Op, Case]]:
    unknown = set(ops) - {op.name for op in registry()}
    if unknown:
        raise SystemExit(
            f"no such op: {', '.join(sorted(unknown))}; there are {', '.join(op.name for op in registry())}"
        )
    return [
        (op, case)
        for op in registry()
        if not ops or op.name in ops
        for case in op.cases()
        if word in case.name and case.small == small
    ]


def _compile(work: tuple[str, int]) -> str:
    """Runs one case once, so that its kernels are in Triton's cache on disk. Gives a sentence when it fails."""
    op = Op(work[0])
    case = op.cases()[work[1]]
    device = torch.device("cuda")
    try:
        bound(op)(**case.make(device, seeded(device)))
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{op.name}, {case.name}, {case.dtype}: {type(problem).__name__}: {str(problem).splitlines()[0]}"
    return ""


def compile_all(processes: int, ops: list[str]) -> list[str]:
    """Compiles every case's kernels (small ones too) in parallel processes; gives the failures."""
    work = [(op.name, i) for op in registry() if not ops or op.name in ops for i in range(len(op.cases()))]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [problem for problem in pool.imap_unordered(_compile, work) if problem]


def base_timings(ref: str, arguments: list[str]) -> list[Timing]:
    """The same measurement on commit `ref`: this script, that commit's kernels."""
    known = subprocess.run(["git", "rev-parse", "-q", "--verify", f"{ref}^{{commit}}"], stdout=subprocess.DEVNULL)
    if known.returncode:
        raise SystemExit(f"--base {ref}: not a commit of this repository")
    with tempfile.TemporaryDirectory() as folder:
        tree, result = f"{folder}/tree", f"{folder}/result.json"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, ref], check=True)
        script = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        command = [sys.executable, "-c", script, *arguments, "--timings", result]
        try:
            subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
            return [Timing(**line) for line in json.loads(Path(result).read_text())]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=False)


def table(timings: list[Timing], before: dict[tuple[str, str, str], Timing]) -> str:
    lines = []
    for t in timings:
        line = f"{t.op:16} {t.case[:38]:38} {t.median:9.2f} µs  {t.gb_per_s:7.0f} GB/s {t.tflop_per_s:7.1f} TFLOP/s"
        line += f" {t.of_floor:6.0%} of floor" + ("" if t.graph else "  (no graph)")
        old = before.get((t.op, t.case, t.dtype))
        lines.append(line + (f"  base {old.median:.2f} µs, {old.median / t.median:.2f} times as fast" if old else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times every op of the registry on the GPU.")
    parser.add_argument("--ops", nargs="*", default=[], help="ops to time (all)")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--small", action="store_true", help="the small cases of the tests instead of real shapes")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--json", type=Path, help="default: perf/results/<gpu>/kernels.json")
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="first compile all cases in N processes")
    parser.add_argument("--timings", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("perf.kernels times compiled kernels and there is no CUDA device here: run it on a GPU")
    device = torch.device("cuda")
    chosen = _chosen(args.ops, args.case, args.small)
    for problem in compile_all(args.compile, args.ops) if args.compile else []:
        print("failed:", problem)
    ceiling = ceilings(device)
    timings, failures = [], []
    for op, case in chosen:
        try:
            timings.append(time_case(op, case, device, ceiling, args.samples))
        except Exception as problem:
            failures.append(f"{op.name}, {case.name}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
        torch.cuda.empty_cache()
    if args.timings:  # another commit's tree, in which --base runs this file, may lack what is imported below
        args.timings.write_text(json.dumps([asdict(t) for t in timings]))
        return
    from perf.provenance import provenance

    before: dict[tuple[str, str, str], Timing] = {}
    if args.base:
        same = ["--ops", *args.ops, "--case", args.case, "--samples", str(args.samples)]
        found = base_timings(args.base, same + (["--small"] if args.small else []))
        before = {(t.op, t.case, t.dtype): t for t in found}
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
    path = args.json or Path("perf/results") / gpu / "kernels.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {
        **provenance(),
        "ceilings": asdict(ceiling),
        "timings": [asdict(t) for t in timings],
        "failures": failures,
        "base": {"ref": args.base, "timings": [asdict(t) for t in before.values()]} if args.base else None,
    }
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    print(table(timings, before))
    for failure in failures:
        print("failed:", failure)
    print(f"copy {ceiling.bytes_per_s * 1e-12:.2f} TB/s, matmul {ceiling.flops_per_s * 1e-12:.0f} TFLOP/s; {path}")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
