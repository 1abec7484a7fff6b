"""How an 8-bit cache keeps keys and values: as 8-bit floats (e4m3, Micikevicius et al. 2022, arXiv:2209.05433) of what
they are over a scale. A cache of the model's dtype keeps them as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class CacheScales:
    """What numbers of a cache are multiplied by to be keys, and to be values: of one layer, on the host, so that scores
    and outputs are scaled where they are anyway. 1 unless the cache is an 8-bit one."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = CacheScales()


def stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """x as a cache of `dtype` keeps it. What is beyond the largest 8-bit float becomes that; a NaN stays one."""
    if dtype != FP8:
        return x.to(dtype)
    return (x.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FP8)


def plain(cache: torch.Tensor) -> torch.Tensor:
    """The cache, as bytes where it holds 8-bit floats, which torch cannot gather and scatter on every device."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


@dataclass(frozen=True, slots=True)
class LatentViews:
    """A cache of latents [N, block_size, L], over `scale` where they are 8-bit floats, and its rotated keys
    [N, block_size, P]."""

    latents: torch.Tensor
    keys: torch.Tensor
    scale: float


def latent_views(cache: torch.Tensor, keys: torch.Tensor | None, latent: int, scale: float) -> LatentViews:
    """Of a cache of `latent` numbers and the rotated keys beside it, or of one that holds both side by side."""
    if keys is None:
        return LatentViews(cache[..., :latent], cache[..., latent:], scale)
    return LatentViews(cache, keys, scale)
