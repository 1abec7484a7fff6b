"""Which kernels multiply by blocks of GGUF files, decided once a shape. Few rows read them packed; for many the numbers
are written out once, and the dense product takes them. Each run of rows in a format of its own has a launch of its
own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.gated_activation.kernel import gated_activation
from kernels.linear import dense
from kernels.linear.fp8_rows import RowTile
from kernels.linear.gguf_rows import rows_product, unpacked
from kernels.linear.packed_dispatch import not_written_out, row_tile
from kernels.tuned.tables import DEFAULT
from kernels.weight import Dense, GgufBlocks
from kernels.workspace import Workspace


class GgufProblem(NamedTuple):
    """What the choice of kernels depends on.

    rows, inputs: of x. outputs in each format, one behind another; of a gated product both halves count.
    """

    rows: int
    outputs: tuple[int, ...]
    inputs: int
    gated: bool
    deterministic: bool
    table: str = DEFAULT


class GgufOperands(NamedTuple):
    """What kernels are launched on; a norm was taken already."""

    workspace: Workspace
    x: torch.Tensor
    weight: GgufBlocks
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    activation: str | None


def _row_config(problem: GgufProblem) -> tuple[RowTile, ...]:
    """The cut of each part's product."""
    rows, outputs, inputs, gated, deterministic, table = problem
    return tuple(row_tile(rows, n // (2 if gated else 1), inputs, gated, deterministic, table) for n in outputs)


def _not_written_out(problem: GgufProblem) -> str | None:
    if problem.deterministic:
        return "its sums depend on the number of rows"
    return not_written_out(problem.rows, problem.table)


def _written_out(operands: GgufOperands, _: Any = None) -> torch.Tensor:
    workspace, x, weight, bias, residual, activation = operands
    whole = Dense(unpacked(workspace, weight, x.dtype))
    return dense.linear(workspace, x, whole, bias, residual=residual, activation=activation)


def _apart(operands: GgufOperands, tiles: tuple[RowTile, ...]) -> torch.Tensor:
    assert operands.activation is not None
    both = _tiles(operands._replace(activation=None), tiles)
    return gated_activation(operands.workspace, both, operands.activation)


def _tiles(operands: GgufOperands, tiles: tuple[RowTile, ...]) -> torch.Tensor:
    workspace, x, weight, bias, residual, activation = operands
    n = weight.shape[0] // (2 if activation else 1)
    y = torch.empty(len(x), n, dtype=x.dtype, device=x.device) if residual is None else residual
    start = 0
    for part, name, tile in zip(weight.parts, weight.formats, tiles, strict=True):
        stop = start + (n if activation else len(part))
        own = bias if bias is None or activation else bias[start:stop]
        left = None if residual is None else residual[:, start:stop]
        rows_product(workspace, x, part, name, own, left, y[:, start:stop], activation, tile)
        start = stop
    return y


DISPATCH: Dispatch[GgufProblem] = Dispatch(
    [
        Variant(
            "written_out",
            _not_written_out,
            lambda problem: None,
            _written_out,
            "not measured for GGUF: the threshold of packed weights, docs/experiments/2026-11-24-quantized-experts.md",
        ),
        Variant(
            "apart",
            lambda problem: (
                None if problem.gated and len(problem.outputs) > 1 else "for gate and up in several formats"
            ),
            lambda problem: _row_config(problem._replace(gated=False)),
            _apart,
            "the only one: a launch has one format, and the halves of a pair would be in two",
        ),
        Variant(
            "tiles",
            lambda problem: None,
            _row_config,
            _tiles,
            "not measured for GGUF: tiles of packed weights, docs/experiments/2026-11-23-packed-products.md",
        ),
    ]
)
