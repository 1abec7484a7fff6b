"""Which kernel multiplies by a weight of 8-bit floats or integers, decided once a shape. Thresholds and tiles were
measured on an H200.

Few rows take one kernel with bias, activation and residual inside: a Triton kernel, or on Hopper above 16 rows a Gluon
kernel (`quantized_stream`). One row takes Gluon kernels that norm and quantize it themselves: one for few outputs
without an activation (`quantized_vector`), one for others in blocks on Hopper (`fp8_row_stream`). Many rows of floats
go to cuBLAS. Other inputs are quantized by a launch before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.linear.fp8_library import library_linear
from kernels.linear.fp8_row_stream import MAX_INPUTS, fp8_row_stream
from kernels.linear.fp8_rows import GROUP, RowTile, fp8_linear
from kernels.linear.quantized_row_stream import MAX_NORMED, RowStreamTile
from kernels.linear.quantized_stream import fp8_stream
from kernels.linear.quantized_vector import QuantizedVectorTile, fp8_vector
from kernels.linear.skinny import counters
from kernels.linear.stream import StreamTile
from kernels.quantize.kernel import quantized
from kernels.rms_norm.kernel import rms_norm
from kernels.sizes import cdiv, next_power_of_2
from kernels.tuned.tables import DEFAULT, numbers, tiles
from kernels.weight import Fp8, Int8
from kernels.workspace import Workspace

# Up to these, rows take a split of the inputs, stream through shared memory, take one tile of rows.
SPLIT_ROWS, FEW_ROWS, LIBRARY_ROWS = 16, 64, 256


class Fp8Problem(NamedTuple):
    """What the choice of a kernel depends on.

    rows, outputs (of which a gated product has two halves), inputs: [rows, inputs] @ [outputs, inputs]ᵀ. vector: one
    row of 16-bit floats, and a weight of 8-bit ones in whole blocks, on a GPU that converts these. library: for more
    than FEW_ROWS rows, whether cuBLAS has a product of these numbers. streams: for up to FEW_ROWS rows, whether
    the bulk copy engine can read both sides, 8-bit floats with scales of 128 inputs or all, on a GPU of this kind.
    table: of tuned numbers. row_streams: whether `fp8_row_stream` takes both sides, but for their size.
    """

    rows: int
    outputs: int
    inputs: int
    gated: bool
    deterministic: bool
    vector: bool
    library: bool
    streams: bool
    table: str = DEFAULT
    row_streams: bool = False


class Fp8Operands(NamedTuple):
    """What a kernel is launched on; x is not normed or quantized yet."""

    workspace: Workspace
    x: torch.Tensor
    weight: Fp8 | Int8
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    offset: float
    residual: torch.Tensor | None
    activation: str | None
    deterministic: bool


def not_narrow(outputs: int, gated: bool, table: str) -> str | None:
    """Why a product of quantized weights is none of few outputs."""
    if gated:
        return "has no activation"
    most = numbers(table, "linear")["vector_outputs"]
    return None if outputs <= most else f"for up to {most} outputs"


def stream_tile(rows: int, activation: bool) -> StreamTile:
    """One program a multiprocessor, with a ring as deep as its shared memory allows."""
    height = 32 if rows <= 32 else FEW_ROWS
    if activation:
        return StreamTile(height, 64, GROUP, 6)
    return StreamTile(height, 64, 2 * GROUP, 6 if height == 32 else 4)


def row_stream_tile(gated: bool) -> RowStreamTile:
    """Three programs a multiprocessor, whose rings fill its shared memory."""
    return RowStreamTile(64, 128, 4, 3) if gated else RowStreamTile(64, 512, 2, 3)


def row_tile(rows: int, n: int, k: int, activation: bool, deterministic: bool, table: str = DEFAULT) -> RowTile:
    """About one program a multiprocessor for up to 16 rows, two of half the outputs for more.

    deterministic: one cut whatever rows there are.
    """
    if deterministic:
        return RowTile(FEW_ROWS, 64, 2 if n <= 1 << 13 and not activation else 1, 4)
    height = min(FEW_ROWS, max(16, next_power_of_2(rows)))
    if rows > LIBRARY_ROWS:
        return RowTile(128, 64 if activation else 128, 1, 3, 8)
    if activation or n >= 1 << 16 or rows > FEW_ROWS:
        return RowTile(height, 128 if height == 16 else 64, 1, 4)
    known = numbers(table, "linear")["programs"]
    outputs, programs = (128, known) if height == 16 else (64, 2 * known)
    split = max(1, min(programs // cdiv(n, outputs), k // (4 * GROUP)))
    return RowTile(height, outputs, split, 7 if height == 16 else 4)


def _not_vector(problem: Fp8Problem) -> str | None:
    if not problem.vector:
        return "needs one 16-bit row on 16 bytes, 8-bit floats in whole blocks of 128 inputs, and Ada"
    most = numbers(problem.table, "linear")["vector_inputs"]
    return (
        f"for up to {most} inputs"
        if problem.inputs > most
        else not_narrow(problem.outputs, problem.gated, problem.table)
    )


def _not_row_streamed(problem: Fp8Problem) -> str | None:
    if not problem.row_streams:
        return "needs Hopper, one 16-bit row on 16 bytes, and 8-bit floats with scales for 128 by 128"
    return None if problem.inputs <= MAX_INPUTS else f"for up to {MAX_INPUTS} inputs"


def _not_library(problem: Fp8Problem) -> str | None:
    if problem.rows <= FEW_ROWS:
        return f"for more than {FEW_ROWS} rows"
    if not problem.library:
        return "needs Hopper, bfloat16 results, and 8-bit floats with the same kind of scales on both sides"
    return None


def _not_streamed(problem: Fp8Problem) -> str | None:
    if not SPLIT_ROWS < problem.rows <= FEW_ROWS:
        return f"for {SPLIT_ROWS + 1} to {FEW_ROWS} rows"
    return None if problem.streams else "needs Hopper, and 8-bit floats on both sides with scales of 128 inputs or all"


def _row_config(problem: Fp8Problem) -> RowTile:
    sizes = (problem.rows, problem.outputs, problem.inputs)
    return row_tile(*sizes, problem.gated, problem.deterministic, problem.table)


def _inputs(operands: Fp8Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x as the product takes it, and its scales, where it is quantized."""
    workspace, x, weight, _, norm_weight, eps, offset, _, _, deterministic = operands
    if weight.inputs.number is not None:
        return quantized(workspace, x, weight.inputs, norm_weight, eps, offset)
    if norm_weight is not None:
        x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
    return x, None


def _library(operands: Fp8Operands, config: None) -> torch.Tensor:
    workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, _deterministic = operands
    assert isinstance(weight, Fp8)
    return library_linear(workspace, x, weight, bias, norm_weight, eps, offset, residual, activation)


def _vector(operands: Fp8Operands, tile: QuantizedVectorTile) -> torch.Tensor:
    workspace, x, weight, bias, norm_weight, eps, offset, residual, _, _ = operands
    assert isinstance(weight, Fp8)
    return fp8_vector(workspace, x, weight, bias, norm_weight, eps, offset, residual, tile)


def row_stream(operands: Fp8Operands, tile: RowStreamTile, limit: float | None = None) -> torch.Tensor:
    """A row that `_not_row_streamed` takes. limit: of the activation, as in `gated_activation`."""
    workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, _ = operands
    assert isinstance(weight, Fp8)
    if norm_weight is not None and x.shape[1] > MAX_NORMED:
        x, norm_weight = rms_norm(workspace, x, norm_weight, eps, offset=offset)[0], None
    normed = (norm_weight, eps, offset)
    return fp8_row_stream(workspace, x, weight, bias, *normed, residual, activation, tile, counters(workspace), limit)


def _stream(operands: Fp8Operands, tile: StreamTile) -> torch.Tensor:
    x, scales = _inputs(operands)
    workspace, weight = operands.workspace, operands.weight
    assert isinstance(weight, Fp8)
    assert scales is not None
    beside = (operands.bias, operands.residual, operands.activation)
    return fp8_stream(workspace, x, scales, weight, *beside, tile, counters(workspace), operands.x.dtype)


def _tiles(operands: Fp8Operands, tile: RowTile) -> torch.Tensor:
    x, scales = _inputs(operands)
    workspace, given, weight, bias, _, _, _, residual, activation, _ = operands
    n = weight.data.shape[0] // (2 if activation else 1)
    y = torch.empty(x.shape[0], n, dtype=given.dtype, device=x.device) if residual is None else residual
    fp8_linear(workspace, x, scales, weight, bias, residual, y, activation, tile)
    return y


DISPATCH: Dispatch[Fp8Problem] = Dispatch(
    [
        Variant(
            "invariant",
            lambda problem: None if problem.deterministic else "for runtime.deterministic",
            _row_config,
            _tiles,
            "not the fastest: each output is the same sum in any batch; docs/performance.md, batch invariance",
        ),
        Variant(
            "vector",
            _not_vector,
            lambda problem: tiles(problem.table, "linear", "quantized_vector_tiles", QuantizedVectorTile)["fp8"],
            _vector,
            "docs/experiments/2026-11-24-one-row-of-quantized-weights.md",
        ),
        Variant(
            "row_stream",
            _not_row_streamed,
            lambda problem: row_stream_tile(problem.gated),
            row_stream,
            "docs/experiments/2026-11-27-one-row-of-fp8.md: a Qwen3-8B-FP8 layer 67.4, 68.2 µs; before 72.5 to 73.1",
        ),
        Variant(
            "library",
            _not_library,
            lambda problem: None,
            _library,
            "docs/experiments/2026-11-23-fp8-products.md, many rows",
        ),
        Variant(
            "stream",
            _not_streamed,
            lambda problem: stream_tile(problem.rows, problem.gated),
            _stream,
            "docs/experiments/2026-11-23-packed-products.md, the same Gluon kernel for FP8",
        ),
        Variant(
            "tiles",
            lambda problem: None,
            _row_config,
            _tiles,
            "what nothing else takes; docs/experiments/2026-11-23-fp8-products.md",
        ),
    ]
)
