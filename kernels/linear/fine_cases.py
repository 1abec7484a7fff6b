"""Inputs of products with 4-bit integers in groups of 32 and 64, which streamed products and those of one row take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.linear.model_shapes import QWEN3_8B
from kernels.registry import Case


def fine_cases(packed_case: Callable[..., Case]) -> list[Case]:
    """packed_case: `kernels.linear.cases.packed_case`."""
    bf16, f16 = torch.bfloat16, torch.float16
    half: dict[str, Any] = {"dtype": f16, "bits": 4, "scales": f16}
    large: dict[str, Any] = {"t": 1, "small": False}
    made = [
        packed_case("int4 fine groups of 32, one row, norm", bf16, 1, 72, 1152, 4, 32, norm=True, offset=1.0),
        packed_case("int4 fine groups of 32, one row, scales apart", f16, 1, 200, 640, 4, 32, zeros=True, bias=True),
        packed_case("int4 fine groups of 64, one row", t=1, n=40, k=2176, group=64, zeros=True, norm=True, **half),
        packed_case("int4 fine groups of 64, one row, silu", bf16, 1, 72, 384, 4, 64, activation="silu", bias=True),
        packed_case("int4 fine groups of 32, few rows", bf16, 3, 200, 640, 4, 32, zeros=True, residual=True),
        packed_case("int4 fine groups of 32, 8 rows, silu", bf16, 8, 136, 1152, 4, 32, activation="silu", bias=True),
        packed_case("int4 fine groups of 64, gelu", bf16, 5, 72, 384, 4, 64, zeros=True, activation="gelu_tanh"),
        packed_case("int4 fine groups of 64, few rows", t=7, n=200, k=640, group=64, residual=True, **half),
        packed_case("int4 fine groups of 32, 13 rows", bf16, 13, 136, 896, 4, 32, bias=True, residual=True),
        packed_case("int4 fine groups of 64, 16 rows", bf16, 16, 200, 640, 4, 64, zeros=True, norm=True),
        packed_case(
            "int4 fine groups of 32, 11 rows, silu", t=11, n=72, k=384, group=32, zeros=True, activation="silu", **half
        ),
        packed_case("int4 fine groups of 32, 17 rows, scales apart", f16, 17, 72, 384, 4, 32, residual=True),
        packed_case("int4 fine groups of 32, 19 rows", bf16, 19, 136, 896, 4, 32, residual=True, bias=True),
        packed_case(
            "int4 fine groups of 32, an order, silu", bf16, 33, 72, 384, 4, 32, zeros=True, ordered=True,
            activation="silu",
        ),
        packed_case("int4 fine groups of 64, 64 rows", bf16, 64, 200, 640, 4, 64, zeros=True, bias=True),
        packed_case("int4 fine groups of 64, 40 rows", t=40, n=136, k=896, group=64, residual=True, **half),
        packed_case("int4 fine groups of 32, deterministic", bf16, 3, 72, 640, 4, 32, deterministic=True),
        packed_case(
            "int4 fine groups of 32, one wide row", bf16, n=4160, k=4352, bits=4, group=32, zeros=True,
            activation="silu", bias=True, norm=True, **large,
        ),
        packed_case("int4 fine groups of 32, one long row", bf16, n=4032, k=8704, bits=4, group=32, norm=True, **large),
        packed_case("int4 fine groups of 64, one long row", n=4096, k=8192, group=64, residual=True, **half, **large),
        packed_case(
            "int4 fine groups of 64, one long row, norm", n=4096, k=8192, group=64, zeros=True, norm=True,
            **half, **large,
        ),
    ]  # fmt: skip
    for t in (1, 2, 8, 16, 32, 64, 1024):
        for name, n, k, fused in QWEN3_8B:
            made.append(packed_case(f"T{t} Qwen3-8B-int4 {name}", bf16, t, n, k, 4, 32, **fused))
    return made
