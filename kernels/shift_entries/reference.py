"""Entries of a step that was planned ahead of what the step before it gave, moved to where their rows truly end."""

from __future__ import annotations

import torch


def shift_entries(
    lengths: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    out_rows: torch.Tensor,
    query_start: torch.Tensor,
    counts: torch.Tensor | None,
    row_lengths: torch.Tensor,
    dummy: int,
) -> None:
    """An entry was planned `ahead` tokens too far, where the row holds fewer than the plan counted on:

        ahead_b = lengths_b − counts_b − row_lengths[rows_b], 0 where out_rows_b = dummy

    It is taken off the entry's length and off the positions of its tokens.

    lengths [B], positions [T] int32 are written in place; rows, out_rows [B], query_start [B + 1] int32; counts [B]
    int32 are drafts of each entry, None where there are none; row_lengths [R] int32. An entry whose out_rows is `dummy`
    draws nothing and stays where it is.
    """
    ahead = lengths - row_lengths.index_select(0, rows)
    if counts is not None:
        ahead = ahead - counts
    ahead = torch.where(out_rows == dummy, 0, ahead)
    lengths.sub_(ahead)
    positions.sub_(ahead.repeat_interleave(query_start.diff()))
