"""Embedding gather."""

from __future__ import annotations

import torch

from kernels.weight import Weight


def embedding(ids: torch.Tensor, weight: Weight, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """y[t] = weight[ids[t]] * scale, with `scale` rounded to `dtype` first (as Gemma does).

    ids [T] int32, weight [V, E] of any kind → [T, E] in `dtype`.
    """
    rows = weight.rows(ids, dtype)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=dtype, device=ids.device)
