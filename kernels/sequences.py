"""Sequences of a step, for references."""

from __future__ import annotations

import torch


def own_sequences(
    query_start: torch.Tensor, context_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sequence for each query, so that every product has the shape of one: of query_start [B+1] and context_len [B],
    the sequence that a query was in [T] int64, and query_start [T+1] and context_len [T] of the new ones. Queries of a
    sequence of context_len 0 keep it."""
    counts = query_start.diff()
    seq = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    query = torch.arange(len(seq), device=seq.device)
    behind = query_start[1:][seq] - 1 - query
    lengths = torch.where(context_len[seq] > 0, context_len[seq] - behind, 0)
    return seq, torch.arange(len(seq) + 1, device=seq.device), lengths
