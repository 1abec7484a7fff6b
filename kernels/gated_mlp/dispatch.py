"""Whether the activation between two products rounds the second's inputs, decided once a shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.gated_activation.kernel import gated_activation
from kernels.linear.fp8_dispatch import FEW_ROWS
from kernels.linear.fp8_library import library_linear, library_product, rows_of
from kernels.linear.kernel import linear
from kernels.quantize.kernel import quantized
from kernels.weight import Fp8, Weight
from kernels.workspace import Workspace


class Problem(NamedTuple):
    """What the choice of launches depends on. library: for many rows cuBLAS has both products, whose inputs are
    8-bit floats."""

    rows: int
    library: bool
    deterministic: bool


class Operands(NamedTuple):
    """As in the reference."""

    workspace: Workspace
    x: torch.Tensor
    gate_up: Weight
    down: Weight
    activation: str
    limit: float | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    offset: float
    residual: torch.Tensor | None
    deterministic: bool


def _not_rounded(problem: Problem) -> str | None:
    if problem.deterministic:
        return "not for runtime.deterministic"
    if problem.rows <= FEW_ROWS:
        return f"for more than {FEW_ROWS} rows"
    return None if problem.library else "needs two weights of 8-bit floats whose products cuBLAS has"


def _rounded(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, gate_up, down, activation, limit, *_ = operands
    assert isinstance(gate_up, Fp8)
    assert isinstance(down, Fp8)
    normed = (operands.norm_weight, operands.eps, operands.offset)
    both = library_linear(workspace, x, gate_up, operands.gate_up_bias, *normed, residual=None, activation=None)
    numbers, scales = quantized(workspace, both, down.inputs, activation=activation, limit=limit, rows_of=rows_of(down))
    return library_product(workspace, numbers, scales, down, operands.down_bias, operands.residual, len(x))


def _apart(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, gate_up, down, activation, limit, *_, residual, deterministic = operands
    normed = (operands.norm_weight, operands.eps, operands.offset)
    # A product's own activation does not clip.
    inside = activation if limit is None else None
    h = linear(workspace, x, gate_up, operands.gate_up_bias, *normed, None, inside, deterministic)
    if limit is not None:
        h = gated_activation(workspace, h, activation, limit)
    return linear(workspace, h, down, operands.down_bias, residual=residual, deterministic=deterministic)


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "rounded",
            _not_rounded,
            lambda problem: None,
            _rounded,
            "docs/experiments/2026-11-24-prompts-with-fp8-weights.md",
        ),
        Variant(
            "apart",
            lambda problem: None,
            lambda problem: None,
            _apart,
            "what nothing else takes; docs/experiments/2026-11-24-prompts-with-fp8-weights.md, before",
        ),
    ]
)
