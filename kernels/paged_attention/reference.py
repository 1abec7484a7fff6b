"""Causal attention of a mixed batch over a paged KV cache (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales, plain


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    scales: CacheScales = UNSCALED,
) -> torch.Tensor:
    """Sequence i's queries are the last query_start[i+1] − query_start[i] of its context_len[i] tokens.

    A query at position p sees keys at positions j with j ≤ p and, with a window w, j > p − w:
        s = softcap(scale · q·k),   o = Σ softmax(s)·v,   a sink adds exp(sink) to the softmax's denominator.

    q [T, H, D]; k_cache [N, G, block_size, D], v_cache [N, G, block_size, Dv]; block_table [B, M] int32;
    query_start [B+1], context_len [B] int32; sinks [H] → [T, H, Dv] in q's dtype, computed in float32.
    The first `num_single` sequences have one query; no sequence has more than `max_query` queries or `max_context`
    keys. A sequence of context_len 0 (padding) gives zeros. The caches hold keys and values over `scales`.
    deterministic: a query's result has the same bits whatever else the batch holds and however prompts are chunked.
    """
    _, g, block_size, _ = k_cache.shape
    t, h, _ = q.shape
    out = torch.zeros(t, h, v_cache.shape[-1], dtype=q.dtype, device=q.device)
    starts, lens = batch.query_start.tolist(), batch.context_len.tolist()
    if deterministic:
        # each query is a sequence of its own, so that every product has the same shape
        table = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(starts).diff()).to(q.device)
        lens = [
            lens[i] and lens[i] - (starts[i + 1] - 1 - j) for i in range(len(lens)) for j in range(*starts[i : i + 2])
        ]
        block_table, starts = block_table[table], list(range(t + 1))
    for i, length in enumerate(lens):
        lo, hi = starts[i], starts[i + 1]
        if hi == lo or length == 0:
            continue
        first_key = 0 if window is None else max(0, length - (hi - lo) - window + 1)
        first_block = first_key // block_size
        blocks = block_table[i, first_block : -(-length // block_size)].long()
        held_k, held_v = (plain(cache)[blocks].view(cache.dtype) for cache in (k_cache, v_cache))
        keys = held_k.transpose(0, 1).reshape(g, -1, q.shape[-1])[:, : length - first_block * block_size]
        values = held_v.transpose(0, 1).reshape(g, -1, out.shape[-1])[:, : length - first_block * block_size]
        rows = q[lo:hi].transpose(0, 1).reshape(g, h // g * (hi - lo), -1).float()
        # In place: scores of a long prompt take as much memory as a GPU has.
        s = (rows @ keys.float().transpose(1, 2)).mul_(scale * scales.k).view(h, hi - lo, -1)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        p = torch.arange(length - (hi - lo), length, device=q.device)[:, None]
        j = torch.arange(first_block * block_size, length, device=q.device)[None]
        seen = j <= p if window is None else (j <= p) & (j > p - window)
        s.masked_fill_(~seen, float("-inf"))
        if sinks is not None:
            s = torch.cat((s, sinks.float()[:, None, None].expand(h, hi - lo, 1)), dim=-1)
        w = torch.softmax(s, dim=-1)[..., : keys.shape[1]]
        o = w.view(g, h // g * (hi - lo), -1) @ values.float() * scales.v
        out[lo:hi] = o.view(h, hi - lo, -1).transpose(0, 1).to(q.dtype)
    return out
