"""Inputs of the gated activation."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    f: int,
    activation: str = "silu",
    limit: float | None = None,
    small: bool = True,
) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {"x": randn(generator, device, dtype, t, 2 * f, scale=3.0), "activation": activation, "limit": limit}

    return Case(name, dtype, make, TOLERANCES[dtype], bytes=3 * t * f * dtype.itemsize, flops=6 * t * f, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for activation in ("silu", "gelu_tanh"):
            for t, f in ((1, 64), (3, 1311), (63, 123)):
                made.append(case(f"T{t} F{f} {activation}", dtype, t, f, activation))
        made.append(case("T3 F123 silu, limit", dtype, 3, 123, limit=1.5))
    made.append(case("no tokens", torch.float32, 0, 64))
    for t in (1, 64, 8192):
        made.append(case(f"T{t} Qwen3-4B", torch.bfloat16, t, 9728, small=False))
    return made
