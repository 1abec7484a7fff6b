"""Routed experts of a layer (Shazeer et al. 2017, arXiv:1701.06538): their choice and their feed-forward parts."""

from __future__ import annotations

import torch

from kernels.moe_gemm.reference import moe_gemm
from kernels.moe_route.reference import moe_route
from kernels.routing import ExpertBiases, Routing
from kernels.weight import Weight


def moe(
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
    """`moe_route`, then `moe_gemm` of the normed rows with the chosen experts and their weights.

    x [T, M]; router [E, M] float32 or in x's dtype; gate_up [E + S, 2F, M] and down [E + S, M, F], the shared experts
    last, or of the experts from `routing.first` on as many as are here, of which alone the result is the sum; residual
    [T, M] → [T, M] in x's dtype. The other arguments are those of the two ops.
    """
    h, weights, experts = moe_route(x, router, routing, token_ids, norm_weight, eps, offset, deterministic)
    given = (residual, activation, limit, routing.num_shared, deterministic, biases)
    return moe_gemm(h, gate_up, down, weights, experts, *given)
