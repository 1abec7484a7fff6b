"""The lightning indexer: which compressed entries a query reads (DeepSeek-V4 2026, §2.3.1)."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.sequences import own_sequences


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    ratio: int,
    top_k: int,
    scale: float,
    deterministic: bool = False,
) -> torch.Tensor:
    """A query at position p scores the entries e < ⌊(p + 1) / ratio⌋ of its sequence by
        score(e) = scale · Σₕ weightsₕ · max(0, qₕ · cache[e])
    and keeps the `top_k` best, of equal scores the earlier, in the order of entries; missing places come last, −1.

    q [T, H, D]; weights [T, H]; cache [N, entries a block, D]; block_table [B, M] int32; query_start [B+1],
    context_len [B] int32 → [T, top_k] int32. Computed in float32.
    deterministic: a query's scores have the same bits whatever else the batch holds and however prompts are chunked.
    """
    query_start, context_len = batch.query_start, batch.context_len
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    per_block = cache.shape[1]
    if deterministic:
        seq, query_start, context_len = own_sequences(query_start, context_len)
        block_table = block_table[seq]
    starts, lens = query_start.tolist(), context_len.tolist()
    for i, length in enumerate(lens):
        lo, hi = starts[i], starts[i + 1]
        entries = length // ratio
        if hi == lo or entries == 0:
            continue
        blocks = block_table[i, : -(-entries // per_block)].long()
        keys = cache[blocks].flatten(0, 1)[:entries].float()
        s = torch.relu(q[lo:hi].float() @ keys.T)
        s = (s * weights[lo:hi].float()[..., None]).sum(dim=1) * scale
        ready = (torch.arange(length - (hi - lo), length, device=q.device) + 1) // ratio
        s = s.masked_fill(torch.arange(entries, device=q.device) >= ready[:, None], float("-inf"))
        best = torch.sort(s, dim=-1, descending=True, stable=True).indices[:, :top_k]
        kept = torch.where(best < ready[:, None], best, entries).sort(dim=-1).values
        out[lo:hi, : best.shape[1]] = torch.where(kept < entries, kept, -1).int()
    return out
