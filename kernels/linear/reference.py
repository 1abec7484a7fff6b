"""Matrix product with weights stored as [out, in], and what a decoder does just before and just after it."""

from __future__ import annotations

import torch

from kernels.gated_activation.reference import gated_activation
from kernels.rms_norm.reference import rms_norm
from kernels.weight import Weight


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """y = residual + act(norm(x) @ weightᵀ + bias), each of norm, bias, act and residual only when it is given.

    x [T, K], weight [N, K] of any kind, bias [N], norm_weight [K], residual [T, N] → [T, N] in x's dtype,
    accumulated in float32.
    norm_weight norms x by RMS first (eps, offset as in `rms_norm`). activation ("silu", "gelu_tanh") takes the N
    columns as gate, then up, and gives [T, N/2]; it excludes a residual. A residual must not be read afterwards: the
    result may stand in its place. Each part rounds to x's dtype here; kernels that have several parts inside round
    once, at the end.
    deterministic: a row's result has the same bits whatever T is and wherever in x the row stands.

    Raises ValueError when activation and residual are both given.
    """
    if activation is not None and residual is not None:
        raise ValueError("linear takes an activation or a residual, not both")
    if norm_weight is not None:
        x, _ = rms_norm(x, norm_weight, eps, offset=offset)
    y = weight.product(x, bias, deterministic)
    if activation is not None:
        return gated_activation(y, activation)
    return y if residual is None else residual + y
