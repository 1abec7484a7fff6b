"""A step's numbers on their way to the device, and its tokens on their way back."""

from __future__ import annotations

import torch


def move_words(
    source: torch.Tensor,
    target: torch.Tensor,
    changes: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """target = source, and table[changes[0]] = changes[1].

    source, target [n], changes [2, p] and table [m] int32, all contiguous; changes name no word twice. Any of them may
    lie in pinned host memory, of which whoever reads it waits for an event, as behind a copy.
    """
    target.copy_(source, non_blocking=True)
    if changes is not None and table is not None:
        words, values = changes.to(table.device, non_blocking=True)
        table[words.long()] = values
