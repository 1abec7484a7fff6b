"""Cases of the rotation of a head's last channels."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import cos_sin
from kernels.registry import Case
from kernels.testing import TOLERANCES, randint, randn


def case(name: str, dtype: torch.dtype, t: int, heads: int, dim: int, rope: int, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(g, device, dtype, t, heads * dim + 6)[:, 6:].unflatten(-1, (heads, dim)),
            "positions": randint(g, device, 0, 64, t),
            "cos_sin": cos_sin(device, 64, rope),
        }

    size = 2 * t * heads * dim * dtype.itemsize
    return Case(name, dtype, make, TOLERANCES[dtype], size, 3 * t * heads * rope, small=small)


def cases() -> list[Case]:
    return [
        case("odd heads", torch.float32, 4, 3, 24, 8),
        case("all channels", torch.bfloat16, 3, 2, 16, 16),
        case("no tokens", torch.float32, 0, 2, 16, 8),
        case("64 tokens, 64 heads of 128", torch.bfloat16, 64, 64, 128, 64, small=False),
    ]
