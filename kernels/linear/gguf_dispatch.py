"""Which kernels multiply by blocks of GGUF files, decided once a shape. Few rows read them packed: 4 to 64 of Q4_K in a
kernel whose columns they are (`gguf_stream`), up to sixteen others in one of registers (`gguf_vector`), and what
neither takes in one of tiles. For many the numbers are written out once, and the dense product takes them. Each run of
rows in a format of its own has a launch of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.gated_activation.kernel import gated_activation
from kernels.linear import dense
from kernels.linear.fp8_rows import RowTile
from kernels.linear.gguf_rows import rows_product, unpacked
from kernels.linear.gguf_stream import GgufStreamTile, gguf_stream
from kernels.linear.gguf_vector import GgufVectorTile, gguf_vector
from kernels.linear.packed_dispatch import not_written_out, row_tile
from kernels.linear.skinny import counters
from kernels.rms_norm.kernel import rms_norm
from kernels.tuned.tables import DEFAULT
from kernels.weight import Dense, GgufBlocks
from kernels.workspace import Workspace

NOT_NORMED = (None, 0.0, 0.0)
# Of 16-bit floats; from one more on, tiles take as long as to write the numbers out and to read them again, or longer.
FEW_ROWS = 16


class GgufProblem(NamedTuple):
    """What the choice of kernels depends on.

    rows, inputs: of x. outputs in each format, one behind another; of a gated product both halves count. vector,
    stream: whether that kernel takes the operands. narrow: x is of 16-bit floats.
    """

    rows: int
    outputs: tuple[int, ...]
    inputs: int
    gated: bool
    deterministic: bool
    table: str = DEFAULT
    vector: bool = False
    stream: bool = False
    narrow: bool = False


class GgufOperands(NamedTuple):
    """What kernels are launched on; x is not normed yet. normed: weight, eps and offset of its norm."""

    workspace: Workspace
    x: torch.Tensor
    weight: GgufBlocks
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    activation: str | None
    normed: tuple[torch.Tensor | None, float, float] = NOT_NORMED
    deterministic: bool = False

    def normed_before(self) -> GgufOperands:
        """The same with the norm taken."""
        weight, eps, offset = self.normed
        if weight is None:
            return self
        x, _ = rms_norm(self.workspace, self.x, weight, eps, offset=offset, deterministic=self.deterministic)
        return self._replace(x=x, normed=NOT_NORMED)


class FormatRows(NamedTuple):
    """Rows of a weight in one format, and what of a product is theirs: bias, residual, and their place in y."""

    rows: torch.Tensor
    format: str
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    y: torch.Tensor


def _row_config(problem: GgufProblem) -> tuple[RowTile, ...]:
    """The cut of each part's product."""
    rows, outputs, inputs, gated, deterministic, table, *_ = problem
    return tuple(row_tile(rows, n // (2 if gated else 1), inputs, gated, deterministic, table) for n in outputs)


def _not_written_out(problem: GgufProblem) -> str | None:
    if problem.deterministic:
        return "its sums depend on the number of rows"
    if problem.narrow:
        return None if problem.rows > FEW_ROWS else f"for more than {FEW_ROWS} rows of 16 bits"
    return not_written_out(problem.rows, problem.table)


def _written_out(operands: GgufOperands, _: Any = None) -> torch.Tensor:
    workspace, x, weight, bias, residual, activation, *_ = operands.normed_before()
    whole = Dense(unpacked(workspace, weight, x.dtype))
    return dense.linear(workspace, x, whole, bias, residual=residual, activation=activation)


def _apart(launch: Callable[[GgufOperands, Any], torch.Tensor], operands: GgufOperands, tiles: Any) -> torch.Tensor:
    """Gate and up without the activation, and that behind them."""
    assert operands.activation is not None
    both = launch(operands._replace(activation=None), tiles)
    return gated_activation(operands.workspace, both, operands.activation)


def _tiles(operands: GgufOperands, tiles: tuple[RowTile, ...]) -> torch.Tensor:
    operands = operands.normed_before()
    y, runs = _runs(operands)
    for (part, name, bias, residual, out), tile in zip(runs, tiles, strict=True):
        rows_product(operands.workspace, operands.x, part, name, bias, residual, out, operands.activation, tile)
    return y


def _vector(operands: GgufOperands, tiles: tuple[GgufVectorTile, ...]) -> torch.Tensor:
    if operands.activation is not None and len(operands.weight.parts) > 1:
        return _apart(_vector, operands, tiles)
    if len(operands.x) > 1:
        operands = operands.normed_before()
    workspace, x, *_, activation, normed, _ = operands
    y, runs = _runs(operands)
    for (part, name, bias, residual, out), tile in zip(runs, tiles, strict=True):
        gguf_vector(workspace, x, part, name, bias, normed, residual, out, activation, tile)
    return y


def _stream(operands: GgufOperands, tile: GgufStreamTile) -> torch.Tensor:
    workspace, x, weight, bias, residual, activation, *_ = operands.normed_before()
    return gguf_stream(workspace, x, weight.parts[0], bias, residual, activation, tile, counters(workspace))


def _runs(operands: GgufOperands) -> tuple[torch.Tensor, list[FormatRows]]:
    """Room for all outputs, and each format's rows."""
    _, x, weight, bias, residual, activation, *_ = operands
    n = weight.shape[0] // (2 if activation else 1)
    y = torch.empty(len(x), n, dtype=x.dtype, device=x.device) if residual is None else residual
    made: list[FormatRows] = []
    start = 0
    for part, name in zip(weight.parts, weight.formats, strict=True):
        stop = start + (n if activation else len(part))
        own = bias if bias is None or activation else bias[start:stop]
        left = None if residual is None else residual[:, start:stop]
        made.append(FormatRows(part, name, own, left, y[:, start:stop]))
        start = stop
    return y, made


def vector_tile(rows: int, n: int, gated: bool) -> GgufVectorTile:
    """Measured on an H200 (docs/experiments/2026-11-27-few-rows-of-gguf-blocks.md). n: outputs."""
    if gated:
        return GgufVectorTile(4, 2)
    return GgufVectorTile(8, 2 if rows == 1 and n <= 4096 else 1)


def _vector_config(problem: GgufProblem) -> tuple[GgufVectorTile, ...]:
    """The cut of each part's product."""
    gated = problem.gated and len(problem.outputs) == 1
    return tuple(vector_tile(problem.rows, n // (2 if gated else 1), gated) for n in problem.outputs)


def _not_vector(problem: GgufProblem) -> str | None:
    if problem.deterministic:
        return "its sums depend on the number of rows"
    if not problem.vector:
        return "for up to 16 rows of 16 bits, whole units of 256 inputs, formats with bits in words, and Ampere"
    return None


def stream_tile(rows: int, gated: bool) -> GgufStreamTile:
    """Four warps, and as many programs as leave two stages of the ring; eight warps where none do."""
    height = next(h for h in (8, 16, 32, 64) if rows <= h)
    some = (GgufStreamTile(height, 4, programs) for programs in (3, 2))
    return next((tile for tile in some if tile.fitting(1 + gated) >= 2), GgufStreamTile(height, 8, 1))


def _not_streamed(problem: GgufProblem) -> str | None:
    if problem.deterministic:
        return "its sums depend on the number of rows"
    if not problem.stream:
        return "for 4 to 64 rows of 16 bits, Q4_K alone, and Hopper"
    return None


DISPATCH: Dispatch[GgufProblem] = Dispatch(
    [
        Variant(
            "stream",
            _not_streamed,
            lambda problem: stream_tile(problem.rows, problem.gated),
            _stream,
            "docs/experiments/2026-11-27-rows-of-gguf-blocks.md",
        ),
        Variant(
            "vector",
            _not_vector,
            _vector_config,
            _vector,
            "docs/experiments/2026-11-27-few-rows-of-gguf-blocks.md",
        ),
        Variant(
            "written_out",
            _not_written_out,
            lambda problem: None,
            _written_out,
            "docs/experiments/2026-11-27-rows-of-gguf-blocks.md",
        ),
        Variant(
            "apart",
            lambda problem: (
                None if problem.gated and len(problem.outputs) > 1 else "for gate and up in several formats"
            ),
            lambda problem: _row_config(problem._replace(gated=False)),
            partial(_apart, _tiles),
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
