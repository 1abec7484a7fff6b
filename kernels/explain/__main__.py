"""Says which kernels an op runs for a shape, why the others do not, and what was measured.

    python -m kernels.explain linear 64x14336x4096 [--weight int4] [--activation silu] …
    python -m kernels.explain linear_norm 64x2048x4096
    python -m kernels.explain gated_mlp 512x4096x14336 [--weight fp8] …
    python -m kernels.explain moe_gemm 64x2048x768x128x8 [--weight fp4] …
    python -m kernels.explain moe 64x2048x768x128x8 …
    python -m kernels.explain paged_attention 64x32x8x128 [--context 1024] [--longer 2x1024] [--cache fp8] …
    python -m kernels.explain rope_attention 1x32x8x128 …
    python -m kernels.explain latent_attention 64x16 …

`OP --help` says what the numbers are. On an H200 unless --arch, --table and --multiprocessors say otherwise; no GPU is
needed.
"""

from __future__ import annotations

import argparse

from kernels.compile_all.targets import TARGETS
from kernels.compile_all.tensors import NeedsValues
from kernels.explain.subjects import DTYPES, SUBJECTS
from kernels.explain.walk import explain
from kernels.hardware import Gpu
from kernels.testing import deterministic
from kernels.tuned.tables import DEFAULT, tables


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "kernels.explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ops = parser.add_subparsers(dest="op", required=True)
    for name, subject in SUBJECTS.items():
        own = ops.add_parser(name)
        own.add_argument("shape", help="x".join(subject.shape))
        own.add_argument("--dtype", choices=DTYPES, default="bfloat16")
        if subject.deterministic:
            own.add_argument("--deterministic", action="store_true", help="as with runtime.deterministic")
        own.add_argument("--arch", type=int, choices=TARGETS, default=90)
        own.add_argument("--table", choices=tables(), help="tuned numbers; without: h200 for --arch 90, else default")
        own.add_argument(
            "--multiprocessors", type=int, help="default: those of the GPU that stands for the architecture"
        )
        subject.options(own)
    args = parser.parse_args(arguments)
    subject = SUBJECTS[args.op]
    try:
        numbers = tuple(map(int, args.shape.split("x")))
        if len(numbers) != len(subject.shape) or min(numbers[1:]) < 1 or numbers[0] < 0:
            raise ValueError
    except ValueError:
        parser.error(f"{args.shape!r} is no shape of {args.op}: give {'x'.join(subject.shape)} in numbers")
    target = TARGETS[args.arch]
    table = args.table or ("h200" if args.arch == 90 else DEFAULT)
    gpu = Gpu(target.capability, args.multiprocessors or target.multiprocessors, table)
    case = subject.case(numbers, args)
    if subject.deterministic and args.deterministic:
        (case,) = deterministic([case], case.name)
    try:
        print(explain(args.op, case, gpu))
    except (NeedsValues, ValueError) as problem:
        parser.error(f"{args.op} {args.shape}: {problem}")


if __name__ == "__main__":
    main()
