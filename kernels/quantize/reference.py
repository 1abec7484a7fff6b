"""Inputs of a quantized product: normed or gated if asked for, then rounded to 8 bits with their scales."""

from __future__ import annotations

import torch

from kernels.gated_activation.reference import gated_activation
from kernels.rms_norm.reference import rms_norm
from kernels.weight.inputs import Inputs
from kernels.weight.inputs import quantize as numbers


def quantize(
    x: torch.Tensor,
    inputs: Inputs,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str | None = None,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] → numbers [T, K] (float8_e4m3fn or int8) and scales [T, groups] float32 (`kernels.weight.inputs`).

    norm_weight [K] norms x by RMS first (eps, offset as in `rms_norm`), rounded to x's dtype. activation and limit are
    those of `gated_activation`: x is [T, 2K] then, gate and up.

    Raises ValueError when a norm and an activation are both given.
    """
    if activation is not None and norm_weight is not None:
        raise ValueError("quantize takes an activation or a norm, not both")
    if activation is not None:
        x = gated_activation(x, activation, limit)
    if norm_weight is not None:
        x, _ = rms_norm(x, norm_weight, eps, offset=offset)
    return numbers(x, inputs)
