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
    if not len(x):
        return torch.empty_like(x)
    x, experts, table = x.contiguous(), experts.contiguous(), gate_up.data
    inter, pairs, count = table.shape[1] // 2, experts.numel(), len(table)
    groups = many_pairs(pairs, count) and grouped_fits(x, table)
    plain = not takes_tiles(activation, biases)
    sizes = (len(x), pairs, count, inter, x.dtype)
    choice = DISPATCH.choose(Problem(*sizes, plain, deterministic, groups, bulk_rows(x, inter)))
    given = (x, table, down.data, weights, experts, residual, activation, limit, num_shared, biases)
    y: torch.Tensor = choice.launch(Operands(workspace, *given), choice.config)
    return y


def takes_tiles(activation: str, biases: ExpertBiases | None) -> bool:
    """Whether experts are of a kind that only tiles of pairs have: with biases, or gated otherwise than by a product of
    the activated gate and the up projection."""
    return biases is not None or activation == "swiglu_oai"


def bulk_rows(x: torch.Tensor, inter: int) -> bool:
    """Whether the bulk copy engine can read rows of matrices for x and for `inter` inner channels."""
    return bulk_copies(x.device) and all(size * x.element_size() % 16 == 0 for size in (x.shape[1], inter))
