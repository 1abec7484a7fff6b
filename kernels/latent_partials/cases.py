"""Cases of attention over a part of a latent cache."""

from __future__ import annotations

from typing import Any

import torch

from kernels.cache_scales import FP8, stored
from kernels.mixed import kept, mixed
from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def case(
    name: str,
    dtype: torch.dtype,
    lengths: list[int],
    heads: int,
    latent: int,
    rope: int,
    small: bool = True,
    block_size: int = 16,
    fp8_scale: float | None = None,
) -> Case:
    """lengths: what each sequence reads here, none for 0. fp8_scale: as in the cases of `latent_attention`."""

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, [(1, max(1, length)) for length in lengths], block_size)
        cache = kept(device, g, dtype, batch, block_size, latent + rope, batch.contexts)
        views: dict[str, Any] = {"cache": cache}
        if fp8_scale is not None:
            latents, keys = (cache[..., :latent] * 3).to(dtype), cache[..., latent:].contiguous()
            views = {"cache": stored(latents, fp8_scale, FP8), "keys": keys, "latent_scale": fp8_scale}
        return {
            "absorbed": randn(g, device, dtype, len(lengths), heads, latent + rope),
            **views,
            "block_table": batch.block_table,
            "context_len": torch.tensor(lengths, dtype=torch.int32, device=device),
            "scale": (latent + rope) ** -0.5,
            "latent": latent,
            "max_context": max(*lengths, 1),
        }

    entries, tokens = sum(lengths), len(lengths)
    held = (entries + tokens * heads) * (latent + rope) * dtype.itemsize + tokens * heads * (latent + 1) * 4
    flops = 2 * heads * entries * (2 * latent + rope)
    return Case(name, dtype, make, TOLERANCES[dtype], held, flops, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    return [
        case("odd heads", f32, [1, 17, 48], 3, 32, 16),
        case("odd sizes, nothing here", f32, [0, 1, 33], 2, 24, 12),
        case("split along the context", f32, [300, 0], 2, 16, 16, block_size=32),
        case("very different lengths", bf16, [500, 3, 70, 0, 1], 16, 32, 16),
        case("more heads than a tile", bf16, [40, 18], 80, 16, 16),
        case("8 bits, odd sizes", f32, [1, 17, 48], 2, 24, 12, fp8_scale=0.02),
        case("64 sequences of 8192, 16 heads", bf16, [8192] * 64, 16, 512, 64, small=False, block_size=64),
        case("8 sequences of 4096, 64 heads", bf16, [4096] * 8, 64, 512, 64, small=False, block_size=64),
    ]
