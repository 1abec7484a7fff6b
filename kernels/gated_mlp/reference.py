"""Gated feed-forward part (Shazeer 2020, arXiv:2002.05202): two products with a gated activation between them."""

from __future__ import annotations

import torch

from kernels.gated_activation.reference import gated_activation
from kernels.linear.reference import linear
from kernels.weight import Weight


def gated_mlp(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: str,
    limit: float | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """y = residual + act(norm(x) @ gate_upᵀ + gate_up_bias) @ downᵀ + down_bias.

    x [T, H], gate_up [2F, H] (gate, then up), down [N, F], gate_up_bias [2F], down_bias [N], norm_weight [H], residual
    [T, N] → [T, N] in x's dtype. activation and limit as in `gated_activation`, the rest as in `linear`: y may stand in
    residual's place.
    """
    h = linear(x, gate_up, gate_up_bias, norm_weight, eps, offset, deterministic=deterministic)
    return linear(
        gated_activation(h, activation, limit), down, down_bias, residual=residual, deterministic=deterministic
    )
