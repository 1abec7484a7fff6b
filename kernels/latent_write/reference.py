"""Norm of the key-value latent, rotary embedding and the write into a latent cache."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., R] float32 turned by angles whose cos and sin [..., R/2] broadcast against it."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def latent_write(
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    norm: torch.Tensor,
    eps: float = 1e-6,
    interleaved: bool = True,
) -> torch.Tensor:
    """cache[slot] = (rms_norm(latent), rotated key);  returns the rotated query part.

    q_rope [T, H, P] (may be a view); kv [T, L + P] (latent, then key); positions [T] int32; slots [T] int64, negative
    writes nothing; cos_sin [*, P] float32, cos first; cache [N, block_size, L + P], written in place; norm [L]
    → [T, H, P]. Computed in float32, rounded once. Pairs are (2i, 2i + 1) if interleaved, else (i, i + P/2).
    """
    latent = norm.shape[0]
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    f = kv[:, :latent].float()
    f = f * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + eps) * norm.float()
    key = rotate(kv[:, latent:].float(), cos, sin, interleaved)
    live = slots >= 0
    places = slots[live]
    cache[places // cache.shape[1], places % cache.shape[1]] = torch.cat((f, key), dim=-1)[live].to(cache.dtype)
    return rotate(q_rope.float(), cos[:, None], sin[:, None], interleaved).to(q_rope.dtype)
