"""python -m kernels.compile_all [--arch 90 …] [--only linear …] [--jobs N]

Prints failures as they come, and at the end a table of ops and architectures, with each failure and each case that is
left out, with a sentence. Exits 1 when a kernel failed, 2 where nothing can be compiled. Machine code goes to Triton's
cache (TRITON_CACHE_DIR): a second run compiles what changed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings

from kernels.compile_all.launches import Report
from kernels.compile_all.targets import TARGETS
from kernels.compile_all.workers import run_all, tasks
from kernels.linear.skinny import INTERPRETED
from kernels.registry import OPS

# Cases named for one failure.
MAX_NAMES = 3


def table(reports: list[Report]) -> str:
    """One line for each op and architecture, and one for their sum."""
    rows = [_row("op", "arch", "cases", "variants", "failures", "left out")]
    counts = [(r.cases, len(r.variants), len(r.failures), len(r.left_out)) for r in reports]
    for report, row in zip(reports, counts, strict=True):
        rows.append(_row(report.op, f"sm_{report.arch}", *row))
    sums = [sum(row[column] for row in counts) for column in range(4)]
    return "\n".join([*rows, _row("all", "", *sums)])


def _row(op: str, arch: str, *counts: int | str) -> str:
    return f"{op:18} {arch:>6}" + "".join(f"{count:>10}" for count in counts)


def sentences(reports: list[Report]) -> list[str]:
    """One for each kernel, architecture and reason of a failure, and one for each case that is left out."""
    made = []
    for report in reports:
        for (kernel, reason), count in report.reasons().items():
            names = list(dict.fromkeys(f.case for f in report.failures if (f.kernel, f.reason) == (kernel, reason)))
            more = f" and {len(names) - MAX_NAMES} more cases" if len(names) > MAX_NAMES else ""
            made.append(
                f"FAILED {report.op} sm_{report.arch} {kernel}: {reason} "
                f"[{count} launches: {'; '.join(names[:MAX_NAMES])}{more}]"
            )
        made += [f"left out: {report.op} sm_{report.arch} {case}: {reason}" for case, reason in report.left_out.items()]
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "kernels.compile_all", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=TARGETS, default=list(TARGETS), help="default: all")
    parser.add_argument("--only", nargs="+", choices=OPS, default=list(OPS), metavar="OP", help="default: every op")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    given = parser.parse_args(argv)
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}: at least one process is needed")
    if INTERPRETED:
        print("TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    start = time.monotonic()
    held: dict[tuple[str, int], Report] = {}

    def done(report: Report) -> None:
        for sentence in sentences([report]):
            print(sentence, file=sys.stderr)
        key = (report.op, report.arch)
        if key in held:
            held[key].add(report)
        else:
            held[key] = report
        print(f"{time.monotonic() - start:7.0f} s  {report.op} sm_{report.arch}", file=sys.stderr, flush=True)

    run_all(tasks(given.only, given.arch), given.jobs, done)
    reports = [held[op, arch] for op in given.only for arch in given.arch if (op, arch) in held]
    print("\n".join([table(reports), *sentences(reports)]))
    return int(any(report.failures for report in reports))


if __name__ == "__main__":
    sys.exit(main())
