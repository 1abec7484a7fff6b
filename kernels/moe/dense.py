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
    up, out = gate_up.data, down.data
    tokens, inter, count = len(x), up.shape[1] // 2, len(up)
    pairs, table = tokens * routing.width, routing.table
    # What chooses and lists at once has a list for every expert.
    alone = deterministic or not tokens or takes_tiles(activation, biases) or count != len(router) + routing.num_shared
    simple = routing.bias is None and table is None and routing.num_groups == 1 and not routing.num_shared
    many = many_pairs(pairs, count)
    problem = Problem(
        *(tokens, pairs, count, len(router), inter, x.dtype, alone, simple and routing.score == "softmax"),
        *(table is not None, not many and rings_fit(x, inter), many and grouped_fits(x, up), bulk_rows(x, inter)),
        multiprocessors(x.device),
    )
    chosen = DISPATCH.choose(problem)
    last = (token_ids, norm_weight, eps, offset, residual, activation, limit, deterministic, biases)
    y: torch.Tensor = chosen.launch(Operands(workspace, x, router, up, out, routing, *last), chosen.config)
    return y
