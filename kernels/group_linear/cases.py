"""Cases of the product by groups."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, deterministic, randn


def case(name: str, dtype: torch.dtype, t: int, groups: int, size: int, outputs: int, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(g, device, dtype, t, groups * size),
            "weight": randn(g, device, dtype, groups, outputs, size, scale=size**-0.5),
        }

    moved = dtype.itemsize * groups * (t * (size + outputs) + size * outputs)
    return Case(name, dtype, make, TOLERANCES[dtype], moved, 2 * t * groups * size * outputs, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    made = [
        case("odd sizes", f32, 3, 2, 72, 37),
        case("many rows", f32, 70, 3, 40, 24),
        case("bfloat16", bf16, 17, 2, 64, 48),
        case("no tokens", f32, 0, 2, 16, 16),
        case("1 token, 8 groups of 4096", bf16, 1, 8, 4096, 1024, small=False),
        case("64 tokens, 8 groups of 4096", bf16, 64, 8, 4096, 1024, small=False),
        case("4096 tokens, 8 groups of 4096", bf16, 4096, 8, 4096, 1024, small=False),
    ]
    return made + deterministic(made, "odd sizes", "many rows", "bfloat16")
