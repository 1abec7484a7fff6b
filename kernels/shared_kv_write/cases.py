"""Cases of the write of a shared key-value vector."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import cos_sin
from kernels.registry import Case
from kernels.testing import TOLERANCES, randint, randn


def case(name: str, dtype: torch.dtype, t: int, heads: int, dim: int, rope: int, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        slots = torch.randperm(16 * (t + 2), generator=g, device=g.device)[:t].to(device)
        if t > 2:
            slots[2] = -1
        return {
            "q": randn(g, device, dtype, t, heads * dim + 8)[:, : heads * dim].unflatten(-1, (heads, dim)),
            "kv": randn(g, device, dtype, t, dim + 8)[:, :dim],
            "positions": randint(g, device, 0, 64, t),
            "slots": slots,
            "cos_sin": cos_sin(device, 64, rope),
            "cache": torch.zeros(t + 2, 16, dim, dtype=dtype, device=device),
            "norm": randn(g, device, torch.float32, dim),
        }

    size = 2 * t * (heads + 1) * dim * dtype.itemsize
    return Case(name, dtype, make, TOLERANCES[dtype], size, 6 * size, mutated=("cache",), small=small)


def cases() -> list[Case]:
    return [
        case("odd heads", torch.float32, 4, 3, 24, 8),
        case("all channels turned", torch.float32, 3, 2, 16, 16),
        case("bfloat16", torch.bfloat16, 5, 4, 64, 16),
        case("no tokens", torch.float32, 0, 4, 32, 16),
        case("64 tokens, 64 heads of 512", torch.bfloat16, 64, 64, 512, 64, small=False),
        case("4096 tokens, 64 heads of 512", torch.bfloat16, 4096, 64, 512, 64, small=False),
    ]
