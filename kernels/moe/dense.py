"""Routed experts with dense weights, by the kernels that `dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.hardware import multiprocessors
from kernels.moe.dispatch import DISPATCH, Operands, Problem
from kernels.moe_gemm.dense import bulk_rows, takes_tiles
from kernels.moe_gemm.dispatch import many_pairs
from kernels.moe_gemm.grouped import grouped_fits
from kernels.moe_gemm.tma_ring import rings_fit
from kernels.routing import ExpertBiases, Routing
from kernels.weight import Dense
from kernels.workspace import Workspace


def moe(
    workspace: Workspace,
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Dense,
    down: Dense,
    routing: Routing,
    token_ids: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. Calls on a device share their counters: they must run in one stream order."""
    up, out, tokens, table = gate_up.data, down.data, x.shape[0], workspace.table
    (count, width, _), routed, dtype = up.shape, router.shape[0], x.dtype
    inter, pairs, shared = width // 2, tokens * routing.width, routing.num_shared
    # What chooses and lists at once has a list for every expert.
    alone = deterministic or not tokens or takes_tiles(activation, biases) or count != routed + shared
    by_token = routing.table is not None
    simple = routing.bias is None and not by_token and routing.num_groups == 1 and not shared
    plain, many = simple and routing.score == "softmax", many_pairs(pairs, count, table)
    rings, groups, bulk = not many and rings_fit(x, inter), many and grouped_fits(x, up), bulk_rows(x, inter)
    facts = (alone, plain, by_token, rings, groups, bulk)
    problem = Problem(tokens, pairs, count, routed, inter, dtype, *facts, multiprocessors(x.device), table)
    chosen = DISPATCH.choose(problem)
    last = (token_ids, norm_weight, eps, offset, residual, activation, limit, deterministic, biases)
    y: torch.Tensor = chosen.launch(Operands(workspace, x, router, up, out, routing, *last), chosen.config)
    return y
