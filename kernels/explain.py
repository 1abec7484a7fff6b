"""Says which kernel an op runs for a shape, why the others do not, and what was measured.

    python -m kernels.explain linear ROWSxOUTPUTSxINPUTS [--dtype bfloat16] [--activation silu] [--norm] [--bias]
        [--deterministic] [--multiprocessors 132] [--no-hopper] [--weight dense|int4|fp4]

On an H100 or H200 unless it is told otherwise; OUTPUTS are those behind an activation. int4 stands for groups of 128.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from kernels.dispatch import Dispatch
from kernels.linear.dispatch import DISPATCH, STREAM_ROWS, Problem
from kernels.linear.packed_dispatch import DISPATCH as PACKED
from kernels.linear.packed_dispatch import PackedProblem
from kernels.linear.tuned_gemms import measured

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def explain(dispatch: Dispatch[Any], problem: Any) -> str:
    """A line a variant, in the order in which they are asked."""
    chosen, printed, won = dispatch.choose(problem), [], False
    for variant, why in dispatch.refusals(problem):
        if why is not None:
            said = f"declines: {why}"
        elif won:
            said = "would take it, and stands behind the winner"
        else:
            won = True
            said = f"runs, with {chosen.config}" if chosen.config is not None else "runs"
            said += f"\n{'':18}measured: {variant.evidence}"
            if variant.name == "library":
                outputs = problem.outputs * (2 if problem.activation else 1)
                said += f"\n{'':18}{measured(outputs, problem.inputs, problem.rows)}"
        printed.append(f"{variant.name:<18}{said}")
    return "\n".join(printed)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=["linear"])
    parser.add_argument("shape", help="ROWSxOUTPUTSxINPUTS")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--activation", choices=["silu", "gelu_tanh"])
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--no-hopper", action="store_true")
    parser.add_argument("--weight", choices=["dense", "int4", "fp4"], default="dense")
    args = parser.parse_args(arguments)
    try:
        rows, outputs, inputs = map(int, args.shape.split("x"))
        if min(rows, outputs, inputs) < 1:
            raise ValueError
    except ValueError:
        parser.error(f"{args.shape!r} is no shape: give three numbers, such as 64x14336x4096")
    dtype = DTYPES[args.dtype]
    if args.weight != "dense":
        streams = args.weight == "int4" and dtype != torch.float32 and not args.no_hopper and inputs % 128 == 0
        gated = args.activation is not None
        packed = PackedProblem(rows, outputs, inputs, gated, args.deterministic, streams, args.multiprocessors)
        print(explain(PACKED, packed))
        return
    narrow = dtype != torch.float32
    copies = narrow and not args.no_hopper and inputs % 8 == 0
    if rows > STREAM_ROWS:
        copies = copies and args.activation is not None and not args.bias and outputs % 8 == 0
    norm = args.norm and rows == 1 and narrow and not args.deterministic
    problem = Problem(
        rows, outputs, inputs, dtype, norm, args.activation, args.deterministic, copies, narrow, args.multiprocessors
    )
    if args.norm and not norm:
        print(f"{'rms_norm':<18}runs before, as a kernel of its own")
    print(explain(DISPATCH, problem))


if __name__ == "__main__":
    main()
