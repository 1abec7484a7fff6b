"""A product and the norm behind it: the norm adds up the product's partials, or each has its own launch, as `dispatch`
chooses."""

from __future__ import annotations

import torch

from kernels.hardware import group_products, multiprocessors
from kernels.linear.stream import streams
from kernels.linear_norm.dispatch import DISPATCH, Operands, Problem
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
    copies = group_products(x.device) and bias is None and isinstance(weight, Dense) and streams(x, weight.data)
    (rows, k), n = x.shape, residual.shape[1]
    chosen = DISPATCH.choose(Problem(rows, n, k, copies, multiprocessors(x.device)))
    operands = Operands(workspace, x, weight, residual, norm_weight, eps, offset, bias)
    made: tuple[torch.Tensor, torch.Tensor] = chosen.launch(operands, chosen.config)
    return made
