"""Query and key norm, rotary embedding of the last channels and the write into a cache of one vector a token."""

from __future__ import annotations

import torch

from kernels.rotate_tail.reference import turn


def shared_kv_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    norm: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """cache[slot] = turned(rms_norm(kv) ∘ norm);  returns turned(rms_norm(q)), a head at a time and without weight.

    q [T, H, D]; kv [T, D], key and value at once; positions [T] int32; slots [T] int64, negative writes nothing;
    cos_sin [*, R] float32, cos first, turns the last R channels in pairs (2i, 2i + 1); cache [N, block_size, D],
    written in place; norm [D] → [T, H, D]. Computed in float32, rounded once.
    """
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)

    def unit(x: torch.Tensor) -> torch.Tensor:
        f = x.float()
        return f * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + eps)

    live = slots >= 0
    places = slots[live]
    entry = turn(unit(kv) * norm.float(), cos, sin)
    cache[places // cache.shape[1], places % cache.shape[1]] = entry[live].to(cache.dtype)
    return turn(unit(q), cos[:, None], sin[:, None]).to(q.dtype)
