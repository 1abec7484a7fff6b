"""Rows of the three kinds of numbers, of odd sizes, strided, and of zeros."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.round_rows.reference import Kind
from kernels.testing import EXACT, randn

_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}


def case(
    name: str,
    dtype: torch.dtype,
    n: int,
    k: int,
    kind: Kind,
    apart: int = 0,
    zeros: bool = False,
    small: bool = True,
) -> Case:
    """n rows of k inputs, which stand `apart` numbers further on than they have to."""

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows = randn(generator, device, dtype, n, k + apart)[:, :k]
        if zeros:
            rows[::2] = 0.0
        return {"rows": rows, "kind": kind}

    moved = int(n * k * (dtype.itemsize + _BYTES[kind]))
    return Case(name, dtype, make, EXACT, bytes=moved, flops=4 * n * k, small=small)


def cases() -> list[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    kinds: tuple[Kind, ...] = ("fp8", "int8", "int4")
    return [
        case("fp8", bf16, 9, 96, "fp8"),
        case("fp8, 333 inputs", f32, 5, 333, "fp8", apart=3),
        case("fp8, rows of zeros", f16, 6, 40, "fp8", zeros=True),
        case("int8", bf16, 9, 96, "int8"),
        case("int8, 333 inputs", f16, 5, 333, "int8", apart=1),
        case("int8, rows of zeros", f32, 6, 40, "int8", zeros=True),
        case("int4", bf16, 9, 96, "int4"),
        case("int4, 333 inputs", f32, 5, 333, "int4", apart=3),
        case("int4, 44 inputs", f16, 5, 44, "int4"),
        case("int4, rows of zeros", bf16, 6, 64, "int4", zeros=True),
        case("one number", bf16, 1, 1, "int4"),
        *(case(f"{kind}, 12,288 rows of 4,096", bf16, 12288, 4096, kind, small=False) for kind in kinds),
        case("fp8, 4,096 rows of 14,336", bf16, 4096, 14336, "fp8", small=False),
    ]
