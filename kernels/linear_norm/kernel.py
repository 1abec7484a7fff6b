"""A product and the norm behind it: on Hopper the norm adds up the product's partials, else each has its own launch."""

from __future__ import annotations

import torch

from kernels.hardware import group_products, multiprocessors
from kernels.linear.kernel import linear
from kernels.linear.split_k import linear_partials, split_k_tile
from kernels.linear.stream import streams
from kernels.rms_norm.kernel import rms_norm, sum_norm
from kernels.weight import Dense, Weight
from kernels.workspace import Workspace


def linear_norm(
    workspace: Workspace,
    x: torch.Tensor,
    weight: Weight,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. residual is contiguous along its rows."""
    if group_products(x.device) and bias is None and isinstance(weight, Dense) and streams(x, weight.data):
        n, k = weight.shape
        tile = split_k_tile(len(x), n, k, multiprocessors(x.device))
        if tile is not None:
            partials = linear_partials(workspace, x, weight.data, tile)
            h, y = sum_norm(workspace, partials, norm_weight, eps, residual, offset)
            return y, h
    y = linear(workspace, x, weight, bias, residual=residual)
    return y, rms_norm(workspace, y, norm_weight, eps, offset=offset)[0]
