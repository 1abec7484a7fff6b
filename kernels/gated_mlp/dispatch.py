"""Where the activation between two products is computed, decided once a shape: in a launch of its own, which may round
the second's inputs, or in the first product, which clips one row of 8-bit floats too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.gated_activation.kernel import gated_activation
from kernels.linear.fp8_dispatch import FEW_ROWS, Fp8Operands, row_stream, row_stream_tile
from kernels.linear.fp8_library import library_linear, library_product, rows_of
from kernels.linear.fp8_row_stream import MAX_INPUTS, row_streams_fp8
from kernels.linear.kernel import linear
from kernels.linear.quantized_row_stream import RowStreamTile
from kernels.quantize.kernel import quantized
from kernels.weight import Fp8, Weight
from kernels.workspace import Workspace


class Problem(NamedTuple):
    """What the choice of launches depends on. library: for many rows cuBLAS has both products, whose inputs are
    8-bit floats. clipped_row: the activation has a limit, and `fp8_row_stream` takes x and gate_up."""

    rows: int
    library: bool
    deterministic: bool
    clipped_row: bool = False


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


def _not_clipped_row(problem: Problem) -> str | None:
    if problem.deterministic:
        return "not for runtime.deterministic"
    if problem.clipped_row:
        return None
    return "needs a limit, Hopper, one 16-bit row on 16 bytes, and 8-bit floats with scales for 128 by 128"


def clips_row(x: torch.Tensor, gate_up: Weight, limit: float | None) -> bool:
    """`Problem.clipped_row`."""
    if limit is None or not isinstance(gate_up, Fp8):
        return False
    return x.shape[1] <= MAX_INPUTS and row_streams_fp8(x, gate_up, gated=True)


def _clipped_row(operands: Operands, tile: RowStreamTile) -> torch.Tensor:
    workspace, x, gate_up, down, activation, limit, *_, residual, _ = operands
    assert isinstance(gate_up, Fp8)
    normed = (operands.norm_weight, operands.eps, operands.offset)
    first = Fp8Operands(workspace, x, gate_up, operands.gate_up_bias, *normed, None, activation, False)
    return linear(workspace, row_stream(first, tile, limit), down, operands.down_bias, residual=residual)


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
    # A product's own activation does not clip: `_clipped_row`'s alone does.
    inside = activation if limit is None else None
    h = linear(workspace, x, gate_up, operands.gate_up_bias, *normed, None, inside, deterministic)
    if limit is not None:
        h = gated_activation(workspace, h, activation, limit)
    return linear(workspace, h, down, operands.down_bias, residual=residual, deterministic=deterministic)


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "clipped_row",
            _not_clipped_row,
            lambda problem: row_stream_tile(gated=True),
            _clipped_row,
            "docs/experiments/2026-11-29-launches-of-deepseek-v4.md",
        ),
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
