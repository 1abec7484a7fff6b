"""Cases of the latent cache write."""

from __future__ import annotations

from typing import Any

import torch

from kernels.cache_scales import FP8
from kernels.mixed import cos_sin
from kernels.registry import Case
from kernels.testing import TOLERANCES, deterministic, randint, randn


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    heads: int,
    latent: int,
    rope: int,
    nope: int,
    absorbed: int,
    small: bool = True,
    fp8_scale: float | None = None,
    **options: Any,
) -> Case:
    """fp8_scale: the scale of latents in a cache of 8-bit floats."""

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        slots = torch.randperm(16 * (t + 2), generator=g, device=g.device)[:t].to(device)
        if t > 2:
            slots[1] = -1
        apart = {}
        if fp8_scale is not None:
            apart = {
                "cache": torch.zeros(t + 2, 16, latent, device=device).to(FP8),
                "keys": torch.zeros(t + 2, 16, rope, dtype=dtype, device=device),
                "latent_scale": fp8_scale,
            }
        return {
            # Queries and latents stand side by side, as one product gives them.
            "q": randn(g, device, dtype, t, heads * (nope + rope) + 16)[:, 16:].unflatten(1, (heads, nope + rope)),
            "kv": randn(g, device, dtype, t, latent + rope + 8)[:, : latent + rope],
            "kv_up": randn(g, device, dtype, heads, nope + 4, latent, scale=nope**-0.5),
            "positions": randint(g, device, 0, 64, t),
            "slots": slots,
            "cos_sin": cos_sin(device, 64, rope),
            "cache": torch.zeros(t + 2, 16, latent + rope, dtype=dtype, device=device),
            **apart,
            "norm": randn(g, device, dtype, latent),
            "absorbed": absorbed,
            **options,
        }

    size = t * (2 * heads * rope + 2 * (latent + rope))
    size += heads * nope * latent * (absorbed > 0) + absorbed * heads * (nope + latent + rope)
    flops = 2 * absorbed * heads * nope * latent + 8 * t * (heads * rope + latent)
    moved = size * dtype.itemsize - (0 if fp8_scale is None else t * latent * (dtype.itemsize - 1))
    written = ("cache",) if fp8_scale is None else ("cache", "keys")
    return Case(name, dtype, make, TOLERANCES[dtype], moved, flops, mutated=(*written, "q"), small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    made = [
        case("odd heads", f32, 5, 3, 24, 8, 12, 5),
        case("halves instead of pairs", f32, 3, 4, 32, 16, 16, 2, interleaved=False),
        case("no query absorbed", f32, 3, 4, 32, 16, 16, 0),
        case("bfloat16", bf16, 4, 16, 64, 16, 32, 4),
        case("some of many tokens absorbed", bf16, 70, 2, 160, 16, 32, 40),
        case("more tokens than one launch absorbs", f32, 70, 2, 32, 16, 16, 66),
        case("more tokens than have their own programs", f32, 259, 2, 16, 4, 16, 0),
        case("8 bits, odd heads", f32, 5, 3, 24, 8, 12, 5, fp8_scale=0.013),
        case("8 bits, beyond the largest", bf16, 4, 16, 64, 16, 32, 4, fp8_scale=1e-3),
        case("8 bits, several tokens a program", f32, 259, 2, 16, 4, 16, 0, fp8_scale=0.5),
        case("8 bits, 64 tokens, 16 heads, 512 + 64", bf16, 64, 16, 512, 64, 128, 64, fp8_scale=0.02, small=False),
        case("8 bits, 8192 tokens, 16 heads", bf16, 8192, 16, 512, 64, 128, 0, fp8_scale=0.02, small=False),
        case("no tokens", f32, 0, 4, 32, 16, 16, 0),
        case("1 token, 16 heads, 512 + 64", bf16, 1, 16, 512, 64, 128, 1, small=False),
        case("64 tokens, 16 heads, 512 + 64", bf16, 64, 16, 512, 64, 128, 64, small=False),
        case("1024 tokens, 16 heads, 512 + 64", bf16, 1024, 16, 512, 64, 128, 1024, small=False),
        case("8192 tokens, 16 heads, 512 + 64", bf16, 8192, 16, 512, 64, 128, 0, small=False),
        case("64 of 8192 tokens absorbed, 16 heads, 512 + 64", bf16, 8192, 16, 512, 64, 128, 64, small=False),
        case("8192 tokens, 64 heads, 512 + 64", bf16, 8192, 64, 512, 64, 128, 0, small=False),
    ]
    return made + deterministic(
        made, "odd heads", "some of many tokens absorbed", "more tokens than one launch absorbs"
    )
