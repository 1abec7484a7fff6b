"""Query and key norm, rotary embedding (Su et al. 2021, arXiv:2104.09864) and the write into the KV cache."""

from __future__ import annotations

import torch


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
    deterministic: bool = False,
) -> torch.Tensor:
    """Norms q and k a head (when weights are given), rotates them, writes k and v to their slots; returns q.

    For a rotated pair (a, b) at angle θ:  a' = a·cos θ − b·sin θ,  b' = b·cos θ + a·sin θ.
    Pairs are (i, i + R/2) or, interleaved, (2i, 2i + 1). Channels past R pass through.

    qkv [T, (H + 2G)·D], rows may stand apart; positions [T] int32; slots [T] int64 (block · block_size + offset,
    negative writes nothing);
    cos_sin [P, R] float32, cos in the first R/2 columns; k_cache, v_cache [N, G, block_size, D], written in place;
    q_norm, k_norm [D] → q [T, H, D]. Computed in float32, rounded once.
    deterministic: a token's results have the same bits whatever T is.
    """
    _, g, block_size, d = k_cache.shape
    t = qkv.shape[0]
    heads = qkv.reshape(t, num_heads + 2 * g, d)
    q, k, v = heads.split((num_heads, g, g), dim=1)
    angles = cos_sin[positions.long()][:, None]
    cos, sin = angles.chunk(2, dim=-1)

    def turn(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        f = x.float()
        if weight is not None:
            f = f * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + eps) * (weight.float() + offset)
        r = cos_sin.shape[1]
        head, tail = f[..., :r], f[..., r:]
        if interleaved:
            a, b = head[..., 0::2], head[..., 1::2]
            head = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = head.chunk(2, dim=-1)
            head = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((head, tail), dim=-1).to(x.dtype)

    live = slots >= 0
    block, place = slots[live] // block_size, slots[live] % block_size
    k_cache[block, :, place] = turn(k, k_norm)[live]
    v_cache[block, :, place] = v[live]
    return turn(q, q_norm)
