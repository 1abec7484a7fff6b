"""Matrix product: each kind of weight has its own launches, looked up once a call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.linear import dense, fp8, gguf, packed
from kernels.rms_norm.kernel import rms_norm
from kernels.weight import Dense, Fp4, Fp8, GgufBlocks, Int8, PackedInt, Parts, Weight
from kernels.workspace import Workspace

# Each takes the workspace, a weight of its kind and the op's other arguments.
LAUNCHES: dict[type, Callable[..., torch.Tensor]] = {
    Dense: dense.linear,
    Fp4: packed.linear,
    Fp8: fp8.linear,
    GgufBlocks: gguf.linear,
    Int8: fp8.linear,
    PackedInt: packed.linear,
}


def linear(
    workspace: Workspace,
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

    Shapes as in the reference; rows of x and residual may be strided. y may stand in residual's place.

    Raises ValueError when activation and residual are both given, TypeError for a kind of weight without launches.
    """
    if activation is not None and residual is not None:
        raise ValueError("linear takes an activation or a residual, not both")
    if isinstance(weight, Parts):
        return _by_part(workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, deterministic)
    launch = LAUNCHES.get(type(weight))
    if launch is None:
        raise TypeError(f"linear has no launch for weights of the kind {type(weight).__name__}")
    return launch(workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, deterministic)


def _by_part(
    workspace: Workspace,
    x: torch.Tensor,
    weight: Parts,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    activation: str | None,
    deterministic: bool,
) -> torch.Tensor:
    """The norm once, each part by the kernels of its kind, and what is behind the product."""
    if norm_weight is not None:
        x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
    none = (None,) * len(weight.parts)
    biases = none if bias is None else bias.split(weight.rows_of)
    residuals = none if residual is None else residual.split(weight.rows_of, dim=-1)
    y = torch.cat(
        [
            linear(workspace, x, part, own, residual=left, deterministic=deterministic)
            for part, own, left in zip(weight.parts, biases, residuals, strict=True)
        ],
        dim=-1,
    )
    return y if activation is None else gated_activation(workspace, y, activation)
