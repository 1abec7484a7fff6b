"""Inputs of a product of 4-bit floats: normed if asked for, then rounded to multiples of 4-bit floats."""

from __future__ import annotations

import torch

from kernels.rms_norm.reference import rms_norm
from kernels.weight.inputs import Inputs
from kernels.weight.inputs import round_fp4 as rounded


def round_fp4(
    x: torch.Tensor,
    inputs: Inputs,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> torch.Tensor:
    """x [T, K] → [T, K] in x's dtype, K whole groups: what `kernels.weight.inputs.round_fp4` says.

    norm_weight [K] norms x by RMS first (eps, offset as in `rms_norm`), rounded to x's dtype.
    """
    if norm_weight is not None:
        x, _ = rms_norm(x, norm_weight, eps, offset=offset)
    return rounded(x, inputs)
