"""Attention over a window of tokens and over compressed entries at once (DeepSeek-V4 2026, §2.3)."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.rotate_tail.reference import turn
from kernels.sequences import own_sequences


def sparse_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    window: int,
    entries: torch.Tensor | None = None,
    entry_table: torch.Tensor | None = None,
    ratio: int = 0,
    chosen: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """A query at position p reads the tokens p − window < j ≤ p and the compressed entries e < ⌊(p + 1) / ratio⌋, or
    those of them that are `chosen`; each is key and value at once, shared by all heads:
        s = scale · q·c,   o = Σ softmax(s) · c,   a sink adds exp(sink) to the softmax's denominator,
    and the last R channels of o are turned back by the angle of p.

    q [T, H, D]; cache [N, block_size, D] with block_table [B, M] int32; query_start [B+1], context_len [B],
    positions [T] int32; cos_sin [*, R] float32; sinks [H]; entries [N', entries a block, D] with entry_table [B, M']
    int32 (ratio 0: none); chosen [T, K] int32, missing ones last and −1 → [T, H, D] in q's dtype, in float32.
    deterministic: a query's result has the same bits whatever else the batch holds and however prompts are chunked.
    """
    query_start, context_len = batch.query_start, batch.context_len
    block_size = cache.shape[1]
    out = torch.zeros_like(q)
    if deterministic:
        seq, query_start, context_len = own_sequences(query_start, context_len)
        block_table = block_table[seq]
        entry_table = None if entry_table is None else entry_table[seq]
    starts, lens = query_start.tolist(), context_len.tolist()
    for i, length in enumerate(lens):
        lo, hi = starts[i], starts[i + 1]
        if hi == lo or length == 0:
            continue
        p = torch.arange(length - (hi - lo), length, device=q.device)
        first = max(0, length - (hi - lo) - window + 1) // block_size
        blocks = block_table[i, first : -(-length // block_size)].long()
        keys = cache[blocks].flatten(0, 1)[: length - first * block_size]
        j = torch.arange(first * block_size, length, device=q.device)
        seen = (j <= p[:, None]) & (j > p[:, None] - window)
        count = length // ratio if ratio else 0
        if entries is not None and entry_table is not None and count:
            blocks = entry_table[i, : -(-count // entries.shape[1])].long()
            keys = torch.cat((keys, entries[blocks].flatten(0, 1)[:count]))
            ready = torch.arange(count, device=q.device) < ((p + 1) // ratio)[:, None]
            if chosen is not None:
                picked = torch.zeros(hi - lo, count + 1, dtype=torch.bool, device=q.device)
                choice = chosen[lo:hi].long()
                picked.scatter_(1, torch.where(choice < 0, count, choice), True)
                ready = ready & picked[:, :count]
            seen = torch.cat((seen, ready), dim=1)
        s = q[lo:hi].float() @ keys.float().T * scale
        s = s.masked_fill(~seen[:, None], float("-inf"))
        s = torch.cat((s, sinks.float()[None, :, None].expand(hi - lo, -1, 1)), dim=-1)
        o = torch.softmax(s, dim=-1)[..., :-1] @ keys.float()
        cos, sin = cos_sin[positions[lo:hi].long()][:, None].chunk(2, dim=-1)
        out[lo:hi] = turn(o, cos, -sin).to(q.dtype)
    return out
