"""Query and key norm, rotary embedding (Su et al. 2021, arXiv:2104.09864) and the write into the KV cache."""

from __future__ import annotations

import torch

from kernels.cache_scales import UNSCALED, CacheScales, plain, stored
from kernels.rope import Rope


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    deterministic: bool = False,
    scales: CacheScales = UNSCALED,
) -> torch.Tensor:
    """Norms q and k a head (when weights are given), rotates them, writes k and v to their slots; returns q.

    For a rotated pair (a, b) at angle θ:  a' = a·cos θ − b·sin θ,  b' = b·cos θ + a·sin θ.

    qkv [T, (H + 2G)·D], rows may stand apart; positions [T] int32; slots [T] int64 (block · block_size + offset,
    negative writes nothing);
    k_cache, v_cache [N, G, block_size, D], written in place → q [T, H, D]. Computed in float32, rounded once; an 8-bit
    cache then keeps the rounded ones over `scales` (`kernels.cache_scales`).
    deterministic: a token's results have the same bits whatever T is.
    """
    _, g, block_size, d = k_cache.shape
    t = qkv.shape[0]
    heads = qkv.reshape(t, num_heads + 2 * g, d)
    q, k, v = heads.split((num_heads, g, g), dim=1)
    angles = rope.cos_sin[positions.long()][:, None]
    cos, sin = angles.chunk(2, dim=-1)

    def turn(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        f = x.float()
        if weight is not None:
            f = f * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + rope.eps) * (weight.float() + rope.offset)
        r = rope.cos_sin.shape[1]
        head, tail = f[..., :r], f[..., r:]
        if rope.interleaved:
            a, b = head[..., 0::2], head[..., 1::2]
            head = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = head.chunk(2, dim=-1)
            head = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((head, tail), dim=-1).to(x.dtype)

    live = slots >= 0
    block, place = slots[live] // block_size, slots[live] % block_size
    plain(k_cache)[block, :, place] = plain(stored(turn(k, rope.k_norm)[live], scales.k, k_cache.dtype))
    plain(v_cache)[block, :, place] = plain(stored(v[live], scales.v, v_cache.dtype))
    return turn(q, rope.q_norm)
