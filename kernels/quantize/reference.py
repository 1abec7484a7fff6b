"""Inputs of a quantized product: normed if asked for, then rounded to 8 bits with their scales."""

from __future__ import annotations

import torch

from kernels.rms_norm.reference import rms_norm
from kernels.weight.inputs import Inputs
from kernels.weight.inputs import quantize as numbers


def quantize(
    x: torch.Tensor,
    inputs: Inputs,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] → numbers [T, K] (float8_e4m3fn or int8) and scales [T, groups] float32 (`kernels.weight.inputs`).

    norm_weight [K] norms x by RMS first (eps, offset as in `rms_norm`), rounded to x's dtype.
    """
    if norm_weight is not None:
        x, _ = rms_norm(x, norm_weight, eps, offset=offset)
    return numbers(x, inputs)
