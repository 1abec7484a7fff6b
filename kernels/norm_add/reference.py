"""A residual sum behind an RMS norm, as layers end that norm what their parts give."""

from __future__ import annotations

import torch

from kernels.rms_norm.reference import rms_norm


def norm_add(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    """y = residual + x / sqrt(mean(x²) + eps) * (weight + offset).

    x, residual [T, E], weight [E] → [T, E] in x's dtype. Norm and sum are each rounded once.
    """
    return residual + rms_norm(x, weight, eps, offset=offset)[0]
