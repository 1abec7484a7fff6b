"""Between the projections and attention over a latent cache (DeepSeek-V2 2024, arXiv:2405.04434).

Norm, rotary embedding, cache write, and the query taken through the key half of the up-projection.
"""

from __future__ import annotations

import torch

from kernels.cache_scales import latent_views, plain, stored


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., R] float32 turned by angles whose cos and sin [..., R/2] broadcast against it."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def latent_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_up: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    norm: torch.Tensor,
    absorbed: int,
    eps: float = 1e-6,
    interleaved: bool = True,
    deterministic: bool = False,
    keys: torch.Tensor | None = None,
    latent_scale: float = 1.0,
) -> torch.Tensor:
    """cache[slot] = (rms_norm(latent), rotated key);  q's last P channels are rotated in place;
    returns (k_upᵀ · q's first channels, q's rotated ones) of the first `absorbed` tokens.

    q [T, H, D + P] (may be a view); kv [T, L + P] (latent, then key); kv_up [H, D + V, L], whose first D rows a head
    are k_up; positions [T] int32; slots [T] int64, negative writes nothing; cos_sin [*, P] float32, cos first; cache
    [N, block_size, L + P], written in place; norm [L] → [absorbed, H, L + P]. Each part is computed in float32 and
    rounded once. Pairs are (2i, 2i + 1) if interleaved, else (i, i + P/2).
    keys [N, block_size, P]: where rotated keys are written; cache [N, block_size, L] then holds 8-bit floats of the
    rounded latents over latent_scale (`kernels.cache_scales`).
    deterministic: a token's results have the same bits whatever T and `absorbed` are.
    """
    latent, rope = norm.shape[0], cos_sin.shape[1]
    nope = q.shape[-1] - rope
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    f = kv[:, :latent].float()
    f = f * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + eps) * norm.float()
    key = rotate(kv[:, latent:].float(), cos, sin, interleaved)
    live = slots >= 0
    places = slots[live]
    views = latent_views(cache, keys, latent, latent_scale)
    at = (places // cache.shape[1], places % cache.shape[1])
    plain(views.latents)[at] = plain(stored(f[live].to(kv.dtype), latent_scale, cache.dtype))
    views.keys[at] = key[live].to(views.keys.dtype)
    q[..., nope:] = rotate(q[..., nope:].float(), cos[:, None], sin[:, None], interleaved).to(q.dtype)
    first = q[:absorbed]
    k_up = kv_up[:, :nope].float()
    rows = first.split(1) if deterministic and absorbed else (first,)
    taken = torch.cat([torch.bmm(row[..., :nope].transpose(0, 1).float(), k_up).transpose(0, 1) for row in rows])
    return torch.cat((taken.to(q.dtype), first[..., nope:]), dim=-1)
