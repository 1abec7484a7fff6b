"""Two products with a gated activation between them, by the launches that `dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.gated_mlp.dispatch import DISPATCH, Operands, Problem, clips_row
from kernels.linear.fp8_library import in_library
from kernels.weight import Weight
from kernels.workspace import Workspace


def gated_mlp(
    workspace: Workspace,
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
    """See the reference. Rows of x and residual may be strided."""
    library = in_library(gate_up, x.dtype) and in_library(down, x.dtype)
    choice = DISPATCH.choose(Problem(len(x), library, deterministic, clips_row(x, gate_up, limit)))
    beside = (gate_up_bias, down_bias, norm_weight, eps, offset, residual, deterministic)
    y: torch.Tensor = choice.launch(Operands(workspace, x, gate_up, down, activation, limit, *beside), choice.config)
    return y
