"""A product added to the residual stream, and the norm that follows it."""

from __future__ import annotations

import torch

from kernels.linear.reference import linear
from kernels.rms_norm.reference import rms_norm
from kernels.weight import Weight


def linear_norm(
    x: torch.Tensor,
    weight: Weight,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = residual + x @ weightᵀ + bias;  h = y / sqrt(mean(y²) + eps) * (norm_weight + offset).

    x [T, K], weight [N, K], residual [T, N], norm_weight and bias [N] → y and h, both [T, N] in x's dtype. The norm is
    of what y was rounded to. A residual must not be read afterwards: y may stand in its place.
    """
    y = linear(x, weight, bias, residual=residual)
    return y, rms_norm(y, norm_weight, eps, offset=offset)[0]
