"""Drafts that the host proposes, into the rows' table of tokens behind the true ends of their rows."""

from __future__ import annotations

import torch


def put_drafts(
    proposed: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """For each j < counts_b, at the place p = lengths_b − counts_b + j of its row,

        tokens[rows_b, p] = proposed[b, min(max(p − starts_b, 0), sizes_b − 1)]

    so an entry finds its own wherever its row ends; behind the last one, or where there is none, any will do.

    proposed [B, P] int32; starts, sizes, counts, lengths, rows [B] int32, sizes ≤ P; tokens [R, L] int32, written in
    place (rows may stand apart).
    """
    within = torch.arange(int(counts.max()) if len(counts) else 0, dtype=torch.int32, device=counts.device)
    at = (lengths - counts)[:, None] + within
    own = torch.minimum((at - starts[:, None]).clamp(min=0), sizes[:, None] - 1).clamp(min=0)
    drafted = within < counts[:, None]
    tokens[rows[:, None].expand_as(at)[drafted], at[drafted]] = proposed.gather(1, own.long())[drafted]
