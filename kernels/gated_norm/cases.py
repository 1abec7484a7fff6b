"""Cases of the gated norm."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def case(name: str, dtype: torch.dtype, t: int, heads: int, dim: int, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(g, device, dtype, t, heads, dim),
            "gate": randn(g, device, dtype, t, heads * dim + 5)[:, 5:],
            "weight": randn(g, device, dtype, dim),
            "eps": 1e-6,
        }

    size = t * heads * dim
    return Case(name, dtype, make, TOLERANCES[dtype], 3 * size * dtype.itemsize, 8 * size, small=small)


def cases() -> list[Case]:
    return [
        case("odd sizes", torch.float32, 3, 5, 27),
        case("bfloat16", torch.bfloat16, 4, 2, 64),
        case("no tokens", torch.float32, 0, 2, 16),
        case("64 tokens, 32 heads of 128", torch.bfloat16, 64, 32, 128, small=False),
        case("8192 tokens, 32 heads of 128", torch.bfloat16, 8192, 32, 128, small=False),
    ]
