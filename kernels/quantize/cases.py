"""Inputs that are quantized: by groups, by row, with a given scale, behind a norm."""

from __future__ import annotations

from typing import Any, Literal

import torch

from kernels.registry import Case
from kernels.testing import ROUNDED, randn
from kernels.weight.inputs import Inputs


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    k: int,
    group: int = 0,
    norm: bool = False,
    static: bool = False,
    power: bool = False,
    small: bool = True,
    number: Literal["fp8", "int8"] = "fp8",
    activation: str | None = None,
    limit: float | None = None,
    largest: float | None = None,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        scale = torch.tensor(0.01, device=device) if static else None
        return {
            "x": randn(g, device, dtype, t, k if activation is None else 2 * k),
            "inputs": Inputs(number, group, power, scale, largest),
            "norm_weight": randn(g, device, dtype, k) if norm else None,
            "eps": 1e-6,
            "offset": 1.0 if norm else 0.0,
            "activation": activation,
            "limit": limit,
        }

    return Case(name, dtype, make, ROUNDED, t * k * (dtype.itemsize + 1), 4 * t * k, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    return [
        case("groups, odd sizes", f32, 5, 333, 128),
        case("groups behind a norm", bf16, 3, 256, 128, norm=True),
        case("groups, powers of two", bf16, 9, 384, 128, power=True),
        case("groups of 32, powers of two, odd sizes", bf16, 5, 333, 32, power=True),
        case("a row", f32, 4, 200),
        case("a row, clipped, behind a norm", f32, 5, 200, norm=True, largest=1.5),
        case("a row behind a norm", bf16, 17, 96, norm=True),
        case("a given scale", bf16, 6, 130, static=True),
        case("a row of integers", f32, 5, 200, number="int8"),
        case("a row of integers behind a norm", bf16, 9, 96, norm=True, number="int8"),
        case("integers of a given scale", bf16, 6, 130, static=True, number="int8"),
        case("groups behind silu", bf16, 9, 384, 128, activation="silu"),
        case("a row behind gelu and a limit, odd sizes", f32, 5, 131, activation="gelu_tanh", limit=0.5),
        case("a given scale behind silu", bf16, 3, 130, static=True, activation="silu"),
        case("no tokens", bf16, 0, 64, 128),
        *(case(f"{t} rows of 4096 behind a norm", bf16, t, 4096, 128, norm=True, small=False) for t in (1, 64, 8192)),
        case("8192 rows of 12288", bf16, 8192, 12288, small=False),
        case("8192 rows of 14336 behind silu", bf16, 8192, 14336, activation="silu", small=False),
    ]
