"""Attention of single queries over a part of what they read, as latents, to be put together with other parts."""

from __future__ import annotations

import torch

from kernels.cache_scales import latent_views, plain


def latent_partials(
    absorbed: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    latent: int,
    max_context: int,
    keys: torch.Tensor | None = None,
    latent_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """With c = (latent, rotated key) an entry, s = scale · (q · c):  o = Σ softmax(s) · latent,  lse = ln Σ eˢ.

    absorbed [B, H, L + P], as `latent_write` gives it: a query a sequence, which reads the first context_len[i] entries
    of its blocks, at most max_context; cache [N, block_size, L + P], L = latent; block_table [B, M] and context_len [B]
    int32 → o [B, H, L] and lse [B, H] float32. A sequence that reads nothing gives zeros and −∞. keys and latent_scale
    as in `latent_attention`.
    """
    held = latent_views(cache, keys, latent, latent_scale)
    out = absorbed.new_zeros(*absorbed.shape[:2], latent, dtype=torch.float32)
    lse = absorbed.new_full(absorbed.shape[:2], float("-inf"), dtype=torch.float32)
    for i, length in enumerate(context_len.tolist()):
        if length == 0:
            continue
        blocks = block_table[i, : -(-length // cache.shape[1])].long()
        latents = plain(held.latents)[blocks].view(cache.dtype).float() * latent_scale
        entries = torch.cat((latents, held.keys[blocks].float()), dim=-1).flatten(0, 1)[:length]
        s = absorbed[i].float() @ entries.T * scale
        out[i], lse[i] = torch.softmax(s, dim=-1) @ entries[:, :latent], torch.logsumexp(s, dim=-1)
    return out, lse
