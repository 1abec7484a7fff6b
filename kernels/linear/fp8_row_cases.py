"""Inputs of products of one row with 8-bit floats in blocks, which a kernel on Hopper norms and quantizes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.registry import Case
from kernels.weight.inputs import Inputs


def fp8_row_cases(fp8_case: Callable[..., Case]) -> list[Case]:
    """fp8_case: `kernels.linear.cases.fp8_case`."""
    bf16, f16, square = torch.bfloat16, torch.float16, (128, 128)
    group, power = Inputs("fp8", 128), Inputs("fp8", 128, True)
    gated: dict[str, Any] = {"norm": True, "activation": "silu"}
    large: dict[str, Any] = {"small": False}
    return [
        fp8_case("fp8 blocks, one row, silu", bf16, 1, 256, 1168, square, group, bias=True, **gated),
        fp8_case("fp8 blocks, one row, many inputs, odd sizes", bf16, 1, 200, 8336, square, group, residual=True),
        fp8_case("fp8 blocks, one row, gelu", f16, 1, 128, 640, square, power, activation="gelu_tanh"),
        fp8_case("fp8 blocks, one row, inputs beyond a norm", bf16, 1, 72, 8336, square, group, norm=True),
        # more tiles than programs: the row's blocks are met several times
        fp8_case("fp8 blocks, one row, many outputs", bf16, 1, 60008, 1152, square, group, norm=True, **large),
        fp8_case("T1 Qwen3-14B-FP8 gate and up", bf16, 1, 17408, 5120, square, group, **gated, **large),
    ]
