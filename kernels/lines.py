"""Lines of a step, for references."""

from __future__ import annotations

import torch


def own_lines(query_start: torch.Tensor, context_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A line for each query, so that every product has the shape of one: of query_start [B+1] and context_len [B], the
    line that a query was in [T] int64, and query_start [T+1] and context_len [T] of the new ones. Queries of a line of
    context_len 0 keep it."""
    counts = query_start.diff()
    line = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    query = torch.arange(len(line), device=line.device)
    behind = query_start[1:][line] - 1 - query
    lengths = torch.where(context_len[line] > 0, context_len[line] - behind, 0)
    return line, torch.arange(len(line) + 1, device=line.device), lengths
