"""Embedding gather."""

from __future__ import annotations

import torch


def embedding(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """y[t] = weight[ids[t]] * scale, with `scale` rounded to the weight's dtype first (as Gemma does).

    ids [T] int32, weight [V, E] → [T, E] in the weight's dtype.
    """
    rows = weight[ids.long()]
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=weight.dtype, device=weight.device)
