"""Inputs of products of two to four rows with large weights of 4-bit integers, whose rows a kernel on Hopper holds in
shared memory: tiles that programs share, and programs that meet a row's inputs more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.registry import Case


def row_cases(packed_case: Callable[..., Case]) -> list[Case]:
    """packed_case: `kernels.linear.cases.packed_case`."""
    bf16, f16 = torch.bfloat16, torch.float16
    large: dict[str, Any] = {"bits": 4, "small": False}
    block: dict[str, Any] = {"group": 128, **large}
    gated: dict[str, Any] = {"norm": True, "activation": "silu", **block}
    made = [
        packed_case("int4, 2 rows, wide, silu", bf16, 2, 4160, 4352, zeros=True, bias=True, **gated),
        packed_case("int4, 2 rows, norm", f16, 2, 4160, 4096, norm=True, offset=1.0, scales=f16, **block),
        packed_case("int4, 2 rows, inputs met again, silu", bf16, 2, 25664, 512, offset=1.0, **gated),
        packed_case("int4, 3 rows, many inputs", f16, 3, 2112, 8704, zeros=True, residual=True, **block),
        packed_case("int4, 3 rows, inputs met again, silu", bf16, 3, 25664, 512, bias=True, **gated),
        packed_case("int4, 4 rows, many inputs, norm", bf16, 4, 2112, 8704, zeros=True, norm=True, bias=True, **block),
        packed_case("int4, 4 rows, inputs met again", bf16, 4, 33984, 1024, residual=True, **block),
        packed_case("int4, 3 rows, inputs met again, norm", bf16, 3, 33984, 1024, bias=True, norm=True, **block),
        packed_case("int4, 4 rows, scales apart", f16, 4, 2112, 8704, residual=True, **block),
        packed_case(
            "int4, 4 rows, gelu", f16, 4, 4160, 4352, group=256, zeros=True, activation="gelu_tanh", **large
        ),
        packed_case("int4, 4 rows, one group", bf16, 4, 2112, 8704, group=8704, residual=True, bias=True, **large),
        packed_case("int4, 4 rows, inputs met again, silu", bf16, 4, 25664, 512, zeros=True, offset=1.0, **gated),
    ]  # fmt: skip
    for t in (2, 4):
        for name, n, k, fused in (
            ("qkv", 6144, 4096, {"norm": True}),
            ("out", 4096, 4096, {"residual": True}),
            ("gate and up", 14336, 4096, {"norm": True, "activation": "silu"}),
            ("down", 4096, 14336, {"residual": True}),
        ):
            made.append(packed_case(f"T{t} Llama-3.1-8B-W4A16 {name}", bf16, t, n, k, **block, **fused))
    return made
