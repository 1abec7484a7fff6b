"""Where the passes that draft on the device read and put their tokens."""

from __future__ import annotations

import torch


def draft_places(
    lengths: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, depth: int, dummy: int
) -> torch.Tensor:
    """Of each pass d < depth and entry b, which drafts counts_b tokens behind the last that its row holds: the row, the
    place before that of the newest token, the newest token's and the drafted one's,

        rows_b, p − 1, p, p + 1    where d < counts_b, with p = lengths_b − counts_b − 1 + d
        dummy,  0,     1, 1        elsewhere: the entry needs the pass no more

    lengths (drafts are counted), counts, rows [B] int32 → [4, depth, B] int32.
    """
    passes = torch.arange(depth, dtype=torch.int32, device=counts.device)[:, None]
    wanted = passes < counts
    place = torch.where(wanted, lengths - counts - 1 + passes, 1)
    behind = torch.where(wanted, place + 1, 1)
    return torch.stack((torch.where(wanted, rows, dummy), place - 1, place, behind)).int()
