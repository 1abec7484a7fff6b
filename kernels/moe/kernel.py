"""Routed experts of a layer: dense ones with fewer launches than choice and products have by themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.moe import dense
from kernels.moe_gemm.kernel import moe_gemm
from kernels.moe_route.kernel import moe_route
from kernels.weight import Dense, Weight
from kernels.workspace import Workspace

# Each takes the workspace, tables of its kind and the op's other arguments. Other kinds choose first.
LAUNCHES: dict[type, Callable[..., torch.Tensor]] = {Dense: dense.moe}


def moe(
    workspace: Workspace,
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    top_k: int,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    renormalize: bool = True,
    scale: float = 1.0,
    num_shared: int = 0,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See the reference. Calls on a device share their counters: they must run in one stream order."""
    how = (score, bias, num_groups, top_groups, group_score, renormalize, scale, num_shared, table, token_ids)
    launch = LAUNCHES.get(type(gate_up))
    if launch is not None and type(down) is type(gate_up):
        given = (residual, activation, limit, deterministic)
        return launch(workspace, x, router, gate_up, down, top_k, norm_weight, eps, offset, *how, *given)
    h, weights, experts = moe_route(workspace, x, router, top_k, norm_weight, eps, offset, *how, deterministic)
    return moe_gemm(
        workspace, h, gate_up, down, weights, experts, residual, activation, limit, num_shared, deterministic
    )
