"""Which kernel multiplies by a weight of packed integers or 4-bit floats, decided once a shape.

Few rows take one kernel that reads the weight packed, with bias, activation and residual inside: a Gluon kernel on
Hopper where it can (`quantized_stream`), else a Triton kernel. One row takes kernels that norm it themselves: one for
large weights on Hopper (`quantized_row_stream`), which takes up to 4 rows, one for few outputs without an activation
(`quantized_vector`). More rows, up to some hundreds, take another one on Hopper, which reads the weight packed too
(`mixed_input`). For many rows the weight's numbers are written out once, and the dense product takes them: that costs
one pass over the weight, where the product has hundreds of operations a byte of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.gated_activation.kernel import gated_activation
from kernels.linear import dense
from kernels.linear.fp8_dispatch import not_narrow
from kernels.linear.fp8_rows import RowTile
from kernels.linear.mixed_input import MixedInputTile, mixed_input_linear
from kernels.linear.packed_rows import WIDTH, packed_linear
from kernels.linear.quantized_row_stream import MAX_NORMED, RowStreamTile, packed_row_stream, whole_tiles
from kernels.linear.quantized_row_stream import MAX_ROWS as ROW_STREAM_ROWS
from kernels.linear.quantized_stream import FINE_ROWS, MAX_ROWS, packed_stream
from kernels.linear.quantized_vector import QuantizedVectorTile, packed_vector
from kernels.linear.skinny import counters
from kernels.linear.stream import StreamTile
from kernels.linear.unpack import unpacked
from kernels.rms_norm.kernel import rms_norm
from kernels.sizes import cdiv, next_power_of_2
from kernels.tuned.tables import DEFAULT, numbers, tiles
from kernels.weight import Dense, Fp4, PackedInt
from kernels.workspace import Workspace

# Of a tile, at most.
FEW_ROWS = 64
# Up to these, the activation is inside of a product that streams.
GATED_ROWS = 64
# Blocks of 128 inputs of a program of the mixed-input GEMM: with fewer it takes a smaller tile; adding up equal ranges
# takes about as long as so many.
FEW_BLOCKS, COMBINED_BLOCKS = 16, 24


class PackedProblem(NamedTuple):
    """What the choice of a kernel depends on.

    rows, outputs (of which a gated product has two halves), inputs: [rows, inputs] @ [outputs, inputs]ᵀ. vector: one
    row of 16-bit floats, by 4-bit integers in groups of whole blocks, 32 or 64, on a GPU whose warps multiply from
    registers. streams: such groups, which the bulk copy engine can read, on a GPU of this kind. table: of tuned
    numbers. mixed: groups of whole blocks that stream, with scales in the rows' dtype. scaled: rows are 8-bit numbers,
    each with a scale. fine: groups of 32 or 64.
    """

    rows: int
    outputs: int
    inputs: int
    gated: bool
    deterministic: bool
    vector: bool
    streams: bool
    multiprocessors: int
    table: str = DEFAULT
    mixed: bool = False
    scaled: bool = False
    fine: bool = False

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.gated else 1)


class PackedOperands(NamedTuple):
    """What a kernel is launched on; x is not normed yet. scales [T]: of rows that are numbers."""

    workspace: Workspace
    x: torch.Tensor
    weight: PackedInt | Fp4
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    offset: float
    residual: torch.Tensor | None
    activation: str | None
    deterministic: bool
    scales: torch.Tensor | None = None


def vector_tile(inputs: int, table: str = DEFAULT) -> QuantizedVectorTile:
    """All of a program's weights are on their way at once, or half of them where there are many inputs."""
    made = tiles(table, "linear", "quantized_vector_tiles", QuantizedVectorTile)
    return made["packed" if inputs <= numbers(table, "linear")["vector_inputs"] else "packed_inputs"]


def stream_tile(rows: int, n: int, activation: bool, multiprocessors: int) -> StreamTile:
    """Programs whose rings fill the shared memory of their multiprocessor: programs of the next product, started early,
    slow these down (measured on an H200). n: rows of the weight."""
    height = next(h for h in (8, 16, 32, 64, MAX_ROWS) if rows <= h)
    if height == MAX_ROWS:
        if n >= 128 * multiprocessors:
            return StreamTile(height, 128, WIDTH, 3, warps=8)
        return StreamTile(height, 64, WIDTH, 4)
    if height == 8:
        return StreamTile(height, 64, 2 * WIDTH if activation else 4 * WIDTH, 4, 2)
    if activation and height == 32:
        return StreamTile(height, 64, WIDTH, 6, 2)
    stages = {16: 4 if activation else 6, 32: 4, 64: 2}
    return StreamTile(height, 64, 2 * WIDTH, stages[height], 2)


def mixed_input_tile(rows: int, n: int, k: int, multiprocessors: int, table: str = DEFAULT) -> MixedInputTile:
    """Tiles of 128 rows of x by 128 of the weight; of 256 by 128, which unpack the weight half as often, where 128 give
    more tiles than run at once and rows fill more than three quarters of 256; of 64 by 128, of which fewer programs
    share one, where a program would have few blocks.

    Programs take whole tiles, or share one; equal ranges of all blocks where that spares the busiest program more than
    adding up costs. n, k: rows and inputs of the weight.
    """
    made = tiles(table, "linear", "mixed_input_tiles", MixedInputTile)
    blocks, tile, tall = cdiv(k, WIDTH), made["some"], made["many"]
    count = cdiv(rows, tile.rows) * cdiv(n, tile.outputs)
    if count * blocks < FEW_BLOCKS * multiprocessors:
        tile = made["few"]
    elif count > multiprocessors and 4 * rows > 3 * tall.rows * cdiv(rows, tall.rows):
        tile = tall
    count, at_once = cdiv(rows, tile.rows) * cdiv(n, tile.outputs), tile.programs * multiprocessors
    split = max(1, at_once // count)
    busiest = cdiv(blocks, split) * cdiv(count, at_once)
    # the kernel computes in 32 bits where a program begins
    ranges = busiest - count * blocks / at_once > COMBINED_BLOCKS or count * split * count * blocks >= 1 << 31
    return replace(tile, split=0 if ranges else split)


def row_tile(rows: int, n: int, k: int, activation: bool, deterministic: bool, table: str = DEFAULT) -> RowTile:
    """About one program a multiprocessor for up to 16 rows, two for more. deterministic: one cut whatever rows there
    are."""
    if deterministic:
        return RowTile(FEW_ROWS, 64, 2 if n <= 1 << 13 and not activation else 1, 3)
    height = min(FEW_ROWS, max(16, next_power_of_2(rows)))
    if activation or n >= 1 << 16:
        return RowTile(height, 64, 1, 3)
    programs = numbers(table, "linear")["programs"] * (1 if height == 16 else 2)
    split = max(1, min(programs // cdiv(n, 64), k // (4 * WIDTH)))
    return RowTile(height, 64, split, 4 if height == 16 else 3)


def _not_vector(problem: PackedProblem) -> str | None:
    if not problem.vector:
        return (
            "needs one 16-bit row on 16 bytes, 4-bit integers in order and in groups of 32, 64 or whole blocks of 128, "
            "and Ampere"
        )
    return not_narrow(problem.outputs, problem.gated, problem.table)


def row_stream_tile(gated: bool) -> RowStreamTile:
    """Measured on an H200 (docs/experiments/2026-11-26-one-row-of-packed-weights.md)."""
    return RowStreamTile(64, 256, 4, 3) if gated else RowStreamTile(64, 512, 2, 4)


def few_rows_stream_tile(shape: tuple[int, int], gated: bool, rows: int, multiprocessors: int) -> RowStreamTile | None:
    """Of two rows or more, which take the place of stages; None where they leave too few
    (docs/experiments/2026-11-27-few-rows-of-packed-weights.md)."""
    return replace(row_stream_tile(gated), stages=4).fitting(shape, gated, rows, multiprocessors)


def _row_stream_config(problem: PackedProblem) -> RowStreamTile | None:
    if problem.rows == 1:
        return row_stream_tile(problem.gated)
    shape = (problem.weight_rows, problem.inputs)
    return few_rows_stream_tile(shape, problem.gated, problem.rows, problem.multiprocessors)


def _not_row_streamed(problem: PackedProblem) -> str | None:
    one = problem.rows == 1
    if not problem.streams or (one and not problem.vector):
        return "needs what `stream` needs, and of one row what `vector` needs"
    if problem.rows > ROW_STREAM_ROWS or (problem.fine and not one):
        return f"for up to {ROW_STREAM_ROWS} rows, in groups of 32 and 64 for one"
    tile = row_stream_tile(problem.gated)
    if not whole_tiles((problem.weight_rows, problem.inputs), problem.gated, tile):
        return f"for multiples of {tile.outputs} outputs and {tile.inputs} inputs"
    least = numbers(problem.table, "linear")["row_stream_integers" if one else "row_stream_integers_of_rows"]
    if problem.weight_rows * problem.inputs < least:
        return f"for a weight of {least} integers or more"
    return None if _row_stream_config(problem) else "for rows of which shared memory holds a program's part"


def _not_streamed(problem: PackedProblem) -> str | None:
    if not problem.streams:
        return "needs Hopper, 16-bit rows on 16 bytes, and 4-bit integers in groups of 32, 64 or whole blocks of 128"
    most = FINE_ROWS if problem.fine else MAX_ROWS
    return None if problem.rows <= most else f"for up to {most} rows"


def _not_mixed(problem: PackedProblem) -> str | None:
    if not problem.mixed:
        return "needs what `stream` needs, groups of whole blocks, and scales in the rows' dtype"
    held = numbers(problem.table, "linear")
    most, least = held["mixed_input_rows"], held["mixed_input_integers"]
    if problem.weight_rows * problem.inputs < least:
        return f"for a weight of {least} integers or more"
    return None if FEW_ROWS < problem.rows <= most else f"for more than {FEW_ROWS} rows, up to {most}"


def not_written_out(rows: int, table: str) -> str | None:
    """Why the numbers of a packed weight are not written out for so many rows."""
    most = numbers(table, "linear")["written_out_rows"]
    return None if rows > most else f"for more than {most} rows"


def _stream_config(problem: PackedProblem) -> StreamTile:
    inside = problem.gated and problem.rows <= GATED_ROWS
    return stream_tile(problem.rows, problem.weight_rows, inside, problem.multiprocessors)


def _mixed_config(problem: PackedProblem) -> MixedInputTile:
    sizes = (problem.rows, problem.weight_rows, problem.inputs)
    return mixed_input_tile(*sizes, problem.multiprocessors, problem.table)


def _row_config(problem: PackedProblem) -> RowTile:
    sizes = (problem.rows, problem.outputs, problem.inputs)
    return row_tile(*sizes, problem.gated, problem.deterministic, problem.table)


def _normed(operands: PackedOperands) -> torch.Tensor:
    workspace, x, _, _, norm_weight, eps, offset, _, _, deterministic, _ = operands
    if norm_weight is None:
        return x
    return rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)[0]


def _vector(operands: PackedOperands, tile: QuantizedVectorTile) -> torch.Tensor:
    workspace, x, weight, bias, norm_weight, eps, offset, residual, *_ = operands
    assert isinstance(weight, PackedInt)
    return packed_vector(workspace, x, weight, bias, norm_weight, eps, offset, residual, tile)


def _row_stream(operands: PackedOperands, tile: RowStreamTile) -> torch.Tensor:
    workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, *_ = operands
    assert isinstance(weight, PackedInt)
    if norm_weight is not None and (x.shape[1] > MAX_NORMED or len(x) > 1):
        x, norm_weight = _normed(operands), None
    normed = (norm_weight, eps, offset)
    return packed_row_stream(workspace, x, weight, bias, *normed, residual, activation, tile, counters(workspace))


def _stream(operands: PackedOperands, tile: StreamTile) -> torch.Tensor:
    x = _normed(operands)
    workspace, weight, bias = operands.workspace, operands.weight, operands.bias
    residual, activation = operands.residual, operands.activation
    assert isinstance(weight, PackedInt)
    inside = activation if len(x) <= GATED_ROWS else None
    y = packed_stream(workspace, x, weight, bias, residual, inside, tile, counters(workspace))
    return gated_activation(workspace, y, activation) if activation and not inside else y


def _mixed(operands: PackedOperands, tile: MixedInputTile) -> torch.Tensor:
    x = _normed(operands)
    workspace, weight, activation = operands.workspace, operands.weight, operands.activation
    assert isinstance(weight, PackedInt)
    y = mixed_input_linear(workspace, x, weight, operands.bias, operands.residual, tile, counters(workspace))
    return gated_activation(workspace, y, activation) if activation else y


def _written_out(operands: PackedOperands, _: Any = None) -> torch.Tensor:
    x = _normed(operands)
    workspace, weight, bias = operands.workspace, operands.weight, operands.bias
    if isinstance(weight, PackedInt) and weight.order is not None:
        x = x.index_select(1, weight.order)
    whole = Dense(unpacked(workspace, weight, x.dtype))
    return dense.linear(workspace, x, whole, bias, residual=operands.residual, activation=operands.activation)


def _tiles(operands: PackedOperands, tile: RowTile) -> torch.Tensor:
    x = _normed(operands)
    workspace, weight, bias = operands.workspace, operands.weight, operands.bias
    residual, activation = operands.residual, operands.activation
    n = weight.shape[0] // (2 if activation else 1)
    y = torch.empty(len(x), n, dtype=x.dtype, device=x.device) if residual is None else residual
    packed_linear(workspace, x, weight, bias, residual, y, activation, tile, operands.scales)
    return y


DISPATCH: Dispatch[PackedProblem] = Dispatch(
    [
        Variant(
            "invariant",
            lambda problem: None if problem.deterministic else "for runtime.deterministic",
            _row_config,
            _tiles,
            "not the fastest: each output is the same sum in any batch; docs/performance.md, batch invariance",
        ),
        Variant(
            "row_stream",
            _not_row_streamed,
            _row_stream_config,
            _row_stream,
            "docs/experiments/2026-11-26-one-row-of-packed-weights.md, "
            "docs/experiments/2026-11-27-few-rows-of-packed-weights.md",
        ),
        Variant(
            "vector",
            _not_vector,
            lambda problem: vector_tile(problem.inputs, problem.table),
            _vector,
            "docs/experiments/2026-11-24-one-row-of-quantized-weights.md",
        ),
        Variant(
            "mixed_input",
            _not_mixed,
            _mixed_config,
            _mixed,
            "docs/experiments/2026-11-24-mixed-input-gemm.md",
        ),
        Variant(
            "stream",
            _not_streamed,
            _stream_config,
            _stream,
            "docs/experiments/2026-11-23-packed-products.md, docs/experiments/2026-11-24-quantized-experts.md",
        ),
        Variant(
            "written_out",
            lambda problem: (
                "for rows without a scale of their own"
                if problem.scaled
                else not_written_out(problem.rows, problem.table)
            ),
            lambda problem: None,
            _written_out,
            "docs/experiments/2026-11-24-quantized-experts.md (packed-rows.jsonl)",
        ),
        Variant(
            "tiles",
            lambda problem: None,
            _row_config,
            _tiles,
            "what nothing else takes; docs/experiments/2026-11-23-packed-products.md",
        ),
    ]
)
