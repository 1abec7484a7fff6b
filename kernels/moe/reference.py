"""Routed experts of a layer (Shazeer et al. 2017, arXiv:1701.06538): their choice and their feed-forward parts."""

from __future__ import annotations

import torch

from kernels.moe_gemm.reference import moe_gemm
from kernels.moe_route.reference import moe_route
from kernels.weight import Weight


def moe(
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
    """`moe_route`, then `moe_gemm` of the normed rows with the chosen experts and their weights.

    x [T, M]; router [E, M] float32 or in x's dtype; gate_up [E + S, 2F, M] and down [E + S, M, F], the shared experts
    last; residual [T, M] → [T, M] in x's dtype. The other arguments are those of the two ops.
    """
    h, weights, experts = moe_route(
        x,
        router,
        top_k,
        norm_weight,
        eps,
        offset,
        score,
        bias,
        num_groups,
        top_groups,
        group_score,
        renormalize,
        scale,
        num_shared,
        table,
        token_ids,
        deterministic,
    )
    return moe_gemm(h, gate_up, down, weights, experts, residual, activation, limit, num_shared, deterministic)
