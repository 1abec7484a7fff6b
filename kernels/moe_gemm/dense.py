"""Feed-forward parts of the chosen experts with dense weights, by the kernels that `dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.hardware import bulk_copies
from kernels.moe_gemm.dispatch import DISPATCH, Problem, many_pairs
from kernels.moe_gemm.grouped import grouped_fits
from kernels.moe_gemm.operands import Operands
from kernels.routing import ExpertBiases
from kernels.weight import Dense
from kernels.workspace import Workspace


def moe_gemm(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Dense,
    down: Dense,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    num_shared: int = 0,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. Calls on a device share their counters: they must run in one stream order."""
    tokens = x.shape[0]
    if not tokens:
        return torch.empty_like(x)
    x, experts, up, table = x.contiguous(), experts.contiguous(), gate_up.data, workspace.table
    (count, width, _), pairs, dtype = up.shape, experts.numel(), x.dtype
    inter = width // 2
    groups = many_pairs(pairs, count, table) and grouped_fits(x, up)
    plain, bulk = not takes_tiles(activation, biases), bulk_rows(x, inter)
    problem = Problem(tokens, pairs, count, inter, dtype, plain, deterministic, groups, bulk, table)
    choice = DISPATCH.choose(problem)
    operands = Operands(workspace, x, up, down.data, weights, experts, residual, activation, limit, num_shared, biases)
    y: torch.Tensor = choice.launch(operands, choice.config)
    return y


def takes_tiles(activation: str, biases: ExpertBiases | None) -> bool:
    """Whether experts are of a kind that only tiles of pairs have: with biases, or gated otherwise than by a product of
    the activated gate and the up projection."""
    return biases is not None or activation == "swiglu_oai"


def bulk_rows(x: torch.Tensor, inter: int) -> bool:
    """Whether the bulk copy engine can read rows of matrices for x and for `inter` inner channels."""
    return bulk_copies(x.device) and all(size * x.element_size() % 16 == 0 for size in (x.shape[1], inter))
