"""What stands beside a module in a checkpoint, held to what its layout stores there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.weights.checkpoint import Entry, listed


def unlike(
    stored: str,
    module: str,
    entries: Mapping[str, Entry],
    kinds: Mapping[str, tuple[torch.dtype, ...]],
    others: Sequence[str] = (),
) -> str | None:
    """A sentence where tensors of a module are missing or are no matrices of their kinds, else None.

    stored: the layout's name. kinds: by the end of a tensor's name. others: ends of tensors of which the format looks
    at what they are by itself.
    """
    absent = [f"{module}.{end}" for end in (*kinds, *others) if f"{module}.{end}" not in entries]
    if absent:
        return f"config.json says that {module} is stored as {stored}, and {listed(absent)} is missing"
    for end, allowed in kinds.items():
        entry = entries[f"{module}.{end}"]
        if entry.dtype not in allowed or len(entry.shape) != 2:
            found = str(entry.dtype).removeprefix("torch.")
            return f"{entry.name} is {found} {list(entry.shape)}, which {stored} does not store there"
    return None
