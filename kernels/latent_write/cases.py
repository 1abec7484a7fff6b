"""Cases of the latent cache write."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import cos_sin
from kernels.registry import Case
from kernels.testing import TOLERANCES, randint, randn


def _case(
    name: str, dtype: torch.dtype, t: int, heads: int, latent: int, rope: int, small: bool = True, **options: Any
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        slots = torch.randperm(16 * (t + 2), generator=g, device=g.device)[:t].to(device)
        if t > 2:
            slots[1] = -1
        return {
            # The query part stands behind channels that are not rotated.
            "q_rope": randn(g, device, dtype, t, heads, 8 + rope)[..., 8:],
            "kv": randn(g, device, dtype, t, latent + rope + 4)[:, : latent + rope],
            "positions": randint(g, device, 0, 64, t),
            "slots": slots,
            "cos_sin": cos_sin(device, 64, rope),
            "cache": torch.zeros(t + 2, 16, latent + rope, dtype=dtype, device=device),
            "norm": randn(g, device, dtype, latent),
            **options,
        }

    size = t * (2 * heads * rope + 2 * (latent + rope)) * dtype.itemsize
    return Case(name, dtype, make, TOLERANCES[dtype], size, 8 * size, mutated=("cache",), small=small)


def cases() -> list[Case]:
    return [
        _case("odd heads", torch.float32, 5, 3, 24, 8),
        _case("halves instead of pairs", torch.float32, 3, 4, 32, 16, interleaved=False),
        _case("bfloat16", torch.bfloat16, 4, 16, 64, 16),
        _case("no tokens", torch.float32, 0, 4, 32, 16),
        _case("64 tokens, 16 heads, 512 + 64", torch.bfloat16, 64, 16, 512, 64, small=False),
        _case("8192 tokens, 64 heads, 512 + 64", torch.bfloat16, 8192, 64, 512, 64, small=False),
    ]
