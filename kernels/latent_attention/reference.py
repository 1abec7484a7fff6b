"""Attention of a mixed batch over a latent cache (DeepSeek-V2 2024, arXiv:2405.04434), with absorbed projections."""

from __future__ import annotations

import torch


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    num_single: int,
    max_query: int,
    max_context: int,
) -> torch.Tensor:
    """Every head reads the same entries c = (latent, rotated key):  s = scale · (q·latent + q_rope·key),
    o = Σ softmax(s) · latent.

    Line i's queries are the last query_start[i+1] − query_start[i] of its context_len[i] tokens and see no later
    token. q [T, H, L] is the query taken through the key half of the up-projection, q_rope [T, H, P];
    cache [N, block_size, L + P]; block_table [B, M] int32; query_start [B+1], context_len [B] int32 → [T, H, L] in
    q's dtype, computed in float32. The first `num_single` lines have one query; no line has more than `max_query`
    queries or `max_context` tokens. A line of context_len 0 gives zeros.
    """
    block_size, latent = cache.shape[1], q.shape[-1]
    out = torch.zeros_like(q)
    starts, lens = query_start.tolist(), context_len.tolist()
    for i, length in enumerate(lens):
        lo, hi = starts[i], starts[i + 1]
        if hi == lo or length == 0:
            continue
        blocks = block_table[i, : -(-length // block_size)].long()
        entries = cache[blocks].flatten(0, 1)[:length].float()
        rows = torch.cat((q[lo:hi], q_rope[lo:hi]), dim=-1).float().flatten(0, 1)
        s = (rows @ entries.T * scale).view(hi - lo, -1, length)
        p = torch.arange(length - (hi - lo), length, device=q.device)[:, None, None]
        s = s.masked_fill(torch.arange(length, device=q.device) > p, float("-inf"))
        o = torch.softmax(s, dim=-1).flatten(0, 1) @ entries[:, :latent]
        out[lo:hi] = o.view(hi - lo, -1, latent).to(q.dtype)
    return out
