"""Routed experts of a layer: dense ones with fewer launches than choice and products have by themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.moe import dense
from kernels.moe_gemm.kernel import moe_gemm
from kernels.moe_route.kernel import moe_route
from kernels.routing import ExpertBiases, Routing
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
    launch = LAUNCHES.get(type(gate_up))
    if launch is not None and type(down) is type(gate_up):
        norm = (norm_weight, eps, offset)
        given = (residual, activation, limit)
        return launch(workspace, x, router, gate_up, down, routing, token_ids, *norm, *given, deterministic, biases)
    h, weights, experts = moe_route(workspace, x, router, routing, token_ids, norm_weight, eps, offset, deterministic)
    last = (residual, activation, limit, routing.num_shared, deterministic, biases)
    return moe_gemm(workspace, h, gate_up, down, weights, experts, *last)
