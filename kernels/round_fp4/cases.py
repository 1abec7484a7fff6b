"""Inputs that are rounded to multiples of 4-bit floats: by both kinds of groups, behind a norm. That is in float32: of
bfloat16, one bit of the norm moves a number by a third of the largest."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import ROUNDED, randn
from kernels.weight.inputs import Inputs


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    k: int,
    group: int,
    norm: bool = False,
    zeros: bool = False,
    small: bool = True,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        x = randn(g, device, dtype, t, k)
        if zeros:
            x[:, : 2 * group] = 0.0
        scale = torch.tensor(3.14159 / (6 * 448), device=device) if group == 16 else None
        return {
            "x": x,
            "inputs": Inputs("fp4", group, scale=scale),
            "norm_weight": randn(g, device, dtype, k) if norm else None,
            "eps": 1e-6,
            "offset": 1.0 if norm else 0.0,
        }

    return Case(name, dtype, make, ROUNDED, 2 * t * k * dtype.itemsize, 4 * t * k, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    return [
        case("groups of 16, odd sizes", f32, 5, 336, 16),
        case("groups of 16, bfloat16", bf16, 6, 176, 16),
        case("groups of 16 behind a norm", f32, 3, 256, 16, norm=True),
        case("groups of 16 without a number", bf16, 2, 64, 16, zeros=True),
        case("groups of 32, odd sizes", f32, 7, 352, 32),
        case("groups of 32 behind a norm", f32, 9, 384, 32, norm=True),
        case("groups of 32 without a number", f32, 2, 96, 32, zeros=True),
        case("no tokens", bf16, 0, 64, 16),
        *(case(f"{t} rows of 4096", bf16, t, 4096, 16, small=False) for t in (1, 64, 8192)),
    ]
