"""Feed-forward parts of chosen experts whose weights are blocks of GGUF files, cut as `gguf_dispatch` says."""

from __future__ import annotations

import torch

from kernels.moe_gemm.gguf_dispatch import DISPATCH, GgufProblem
from kernels.moe_gemm.operands import Operands
from kernels.routing import ExpertBiases
from kernels.weight import GgufBlocks
from kernels.workspace import Workspace


def moe_gemm(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: GgufBlocks,
    down: GgufBlocks,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    num_shared: int = 0,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. Every shape that a launch depends on is known to the host, so that graphs can hold it.

    gate_up has one part, or one for gate and one for up; down has one.
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    choice = DISPATCH.choose(GgufProblem(experts.numel(), gate_up.shape[0], deterministic))
    operands = Operands(workspace, x, gate_up, down, weights, experts, residual, activation, limit, num_shared, biases)
    y: torch.Tensor = choice.launch(operands, choice.config)
    return y
