"""Which kernel multiplies by a dense weight, and its tiles. Thresholds and tiles were measured on an H200, most by
`perf.tune.linear`.

One row: a Triton matrix-vector kernel (`skinny`). Up to 64 rows: on Hopper a Gluon kernel that streams the weight
through shared memory (`stream`, or `warp_specialized` with a warp that does nothing but ask for it), elsewhere Triton
tiles (`skinny`). Many rows: cuBLAS, with norm and activation as kernels of their own, and with algorithms that were
measured (`tuned_gemms`); on Hopper a Gluon kernel has the activation inside (`gated_persistent`) where its tiles fill
the GPU.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.gated_activation.kernel import gated_activation
from kernels.linear import invariant
from kernels.linear.gated_persistent import GatedPersistentTile, gated_persistent_linear
from kernels.linear.persistent import PersistentTile, persistent_linear
from kernels.linear.skinny import Tile, VectorTile, counters, tile_linear, vector_linear
from kernels.linear.stream import StreamTile, stream_linear
from kernels.linear.warp_specialized import WarpSpecializedTile, warp_specialized_linear
from kernels.linear.waves import filled
from kernels.sizes import cdiv
from kernels.tuned.tables import DEFAULT, numbers, tiles
from kernels.workspace import Workspace

STREAM_ROWS = 64
FEW_ROWS = 16
TILE_ROWS = 32


class Problem(NamedTuple):
    """What the choice of a kernel depends on.

    rows, outputs (of which a gated product has two halves), inputs: [rows, inputs] @ [outputs, inputs]ᵀ. norm: that
    of x is still to be taken. copies: the bulk copy engine can read the operands, and on this GPU groups of warps
    multiply from shared memory. triton: in a type that Triton's kernels are meant for. table: of tuned numbers.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    norm: bool
    activation: str | None
    deterministic: bool
    copies: bool
    triton: bool
    multiprocessors: int
    table: str = DEFAULT

    @property
    def sizes(self) -> tuple[int, int, int, bool, int, str]:
        """As tiles are chosen by them."""
        return self.rows, self.outputs, self.inputs, self.activation is not None, self.multiprocessors, self.table


class Operands(NamedTuple):
    """What a kernel is launched on; `norm_weight` is None where the norm was taken already."""

    workspace: Workspace
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    offset: float
    residual: torch.Tensor | None
    activation: str | None


def vector_tile(n: int, k: int, norm: bool, activation: bool, table: str = DEFAULT) -> VectorTile:
    made, known = tiles(table, "linear", "vector_tiles", VectorTile), numbers(table, "linear")
    if activation:
        return made["gated"]
    if k >= known["many_inputs"] or n >= known["head_outputs"]:
        return made["large"]
    if norm:
        if k > known["few_inputs"]:
            return made["normed_inputs" if n >= 4096 else "normed_inputs_narrow"]
        return made["normed"] if n <= 4096 else made["normed_outputs"]
    return made["few_inputs"] if n <= k == known["few_inputs"] else made["plain"]


def stream_tile(rows: int, n: int, k: int, activation: bool, multiprocessors: int, table: str = DEFAULT) -> StreamTile:
    """Tiles of 64 outputs, rings as deep as shared memory allows (half of that where two programs share it).

    Fewer tiles than multiprocessors are cut into slices, so that nearly all have one; more of them, and sizes at which
    adding slices up costs little, are cut into equal ranges.
    """
    height = next(h for h in (8, 16, 32, STREAM_ROWS) if rows <= h)
    if activation:
        if height == STREAM_ROWS:
            return StreamTile(height, 64, 128, 2, split=1)
        return StreamTile(height, 64, 128, 5) if height == 32 else StreamTile(height, 64, 256, 3)
    if n >= numbers(table, "linear")["head_outputs"]:
        return StreamTile(height, 128, 128, 4, warps=8)
    blocks = cdiv(n, 64)
    split = max(1, min(multiprocessors // blocks, cdiv(k, 256)))
    if height == 8:
        if 2 * blocks < multiprocessors and k <= 4096:
            return StreamTile(height, 64, 256, 3, split=split + 1)
        return StreamTile(height, 64, 256, 6, split=split if blocks <= multiprocessors else 0)
    if height == STREAM_ROWS:
        return StreamTile(height, 64, 128, 6, split=split if blocks <= multiprocessors else 0)
    if k > 4096 or height == 32:
        return StreamTile(height, 64, 256, 5 if height == 16 else 4)
    return StreamTile(height, 64, 256, 2)


def warp_specialized_tile(
    rows: int, n: int, k: int, activation: bool, multiprocessors: int, table: str = DEFAULT
) -> WarpSpecializedTile | None:
    """None where a warp of its own for loads did not gain at 40 to 64 rows, and for sizes that were not measured.

    Of few inputs a program takes whole tiles: adding parts up took longer than the multiprocessors left idle.
    """
    known = numbers(table, "linear")
    if rows <= known["warp_specialized_rows"]:
        return None
    if activation:
        return WarpSpecializedTile(2, 2) if k >= known["middle_inputs"] else None
    split = multiprocessors // cdiv(n, 64)
    if not 2 <= split <= 4:
        return None
    if k <= known["few_inputs"]:
        return WarpSpecializedTile(9, 4)
    # all of a program's weights stand in its ring before the wait
    return WarpSpecializedTile(8, 3, split) if k <= 1024 * split else None


def gated_persistent_tile(
    rows: int, n: int, k: int, multiprocessors: int, table: str = DEFAULT
) -> GatedPersistentTile | None:
    """None where the library is faster: it fills a GPU at any size, and pays 256/k of its time for the activation.

    From `all_gated_persistent_rows` on there are so many tiles that it no longer matters how the last wave is filled; a
    warm-up of that many rows then knows the kernel.
    """
    known = numbers(table, "linear")
    if rows >= known["all_gated_persistent_rows"]:
        return GatedPersistentTile()
    gains = rows >= known["gated_persistent_rows"] and filled(rows, n, multiprocessors) * (1 + 256 / k) >= 1
    return GatedPersistentTile() if gains else None


def few_rows_tile(rows: int, n: int, activation: bool, table: str = DEFAULT) -> Tile:
    """Narrow outputs are split over the inputs, so that there are programs for every multiprocessor."""
    made = tiles(table, "linear", "few_rows_tiles", Tile)
    if rows <= FEW_ROWS:
        if n >= numbers(table, "linear")["head_outputs"]:
            return made["head"]
        if activation:
            return made["gated"]
        return made["wide"] if n > 4096 else made["narrow"]
    if activation:
        return made["more_gated"]
    return made["more_wide"] if n > 4096 else made["more_narrow"]


def _invariant(most: int, problem: Problem) -> str | None:
    """Why a tile of the copy engine's for up to `most` rows does not take a batch-invariant product."""
    if not problem.deterministic:
        return "for runtime.deterministic"
    if not problem.copies:
        return "needs Hopper, a 16-bit weight of whole 16 bytes on both sides, and behind an activation no bias"
    return None if problem.rows <= most else f"for up to {most} rows"


def _not_invariant_few(problem: Problem) -> str | None:
    return _invariant(invariant.STREAM_ROWS, problem)


def _not_invariant_gated(problem: Problem) -> str | None:
    return _invariant(sys.maxsize, problem) or ("for an activation" if problem.activation is None else None)


def _not_invariant_many(problem: Problem) -> str | None:
    return _invariant(sys.maxsize, problem) or (None if problem.activation is None else "has no activation")


def _invariant_few_config(problem: Problem) -> StreamTile:
    rows, n, k, gated, multiprocessors, _ = problem.sizes
    return invariant.few_rows_tile(rows, n, k, gated, multiprocessors)


def _invariant_many_config(problem: Problem) -> PersistentTile:
    return invariant.many_rows_tile(problem.rows, problem.outputs, problem.inputs, problem.multiprocessors)


def _not_streamed(problem: Problem) -> str | None:
    if problem.deterministic:
        return "its sums depend on the number of rows"
    if not 1 < problem.rows <= STREAM_ROWS:
        return f"for 2 to {STREAM_ROWS} rows"
    return None if problem.copies else "needs Hopper, a 16-bit type and rows on 16 bytes"


def _not_warp_specialized(problem: Problem) -> str | None:
    why = _not_streamed(problem)
    if why is None and warp_specialized_tile(*problem.sizes) is None:
        least = numbers(problem.table, "linear")["warp_specialized_rows"]
        why = f"for more than {least} rows, of sizes at which a warp of its own for loads gained"
    return why


def _not_gated_persistent(problem: Problem) -> str | None:
    if problem.activation is None or problem.rows <= STREAM_ROWS:
        return f"for more than {STREAM_ROWS} rows behind an activation"
    if not problem.copies:
        return "needs Hopper, a 16-bit type, rows on 16 bytes, and no bias"
    if _gated_persistent_config(problem) is None:
        return "the library fills the GPU better at this number of rows"
    return None


def _gated_persistent_config(problem: Problem) -> GatedPersistentTile | None:
    sizes = (problem.rows, problem.outputs, problem.inputs, problem.multiprocessors)
    return gated_persistent_tile(*sizes, problem.table)


def _vector_config(problem: Problem) -> VectorTile:
    gated = problem.activation is not None
    return vector_tile(problem.outputs, problem.inputs, problem.norm, gated, problem.table)


def _not_vector(problem: Problem) -> str | None:
    if problem.rows != 1:
        return "for one row"
    return None if problem.triton else "float32 is the library's"


def _not_few_rows(problem: Problem) -> str | None:
    head = numbers(problem.table, "linear")["head_outputs"]
    if problem.rows > FEW_ROWS and (problem.rows > TILE_ROWS or problem.outputs >= head):
        return f"for up to {TILE_ROWS} rows, {FEW_ROWS} of a head's {head} outputs"
    return None if problem.triton else "float32 is the library's"


def _tiles(operands: Operands, tile: Tile) -> torch.Tensor:
    workspace, x, weight, bias, norm_weight, eps, offset, residual, activation = operands
    return tile_linear(workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, tile)


def _vector(operands: Operands, tile: VectorTile) -> torch.Tensor:
    workspace, x, weight, bias, norm_weight, eps, offset, residual, activation = operands
    return vector_linear(workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, tile)


def _stream(operands: Operands, tile: StreamTile) -> torch.Tensor:
    workspace, x, weight, bias, _, _, _, residual, activation = operands
    return stream_linear(workspace, x, weight, bias, residual, activation, tile, counters(workspace))


def _warp_specialized(operands: Operands, tile: WarpSpecializedTile) -> torch.Tensor:
    workspace, x, weight, bias, _, _, _, residual, activation = operands
    return warp_specialized_linear(workspace, x, weight, bias, residual, activation, tile, counters(workspace))


def _gated_persistent(operands: Operands, tile: GatedPersistentTile) -> torch.Tensor:
    assert operands.activation is not None
    return gated_persistent_linear(operands.workspace, operands.x, operands.weight, operands.activation, tile)


def _persistent(operands: Operands, tile: PersistentTile) -> torch.Tensor:
    workspace, x, weight, bias, _, _, _, residual, _ = operands
    return persistent_linear(workspace, x, weight, bias, residual, tile)


def library(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, weight, bias, _, _, _, residual, activation = operands
    if bias is None:
        y = _product(workspace, x, weight, residual)
        return y if activation is None else gated_activation(workspace, y, activation)
    y = torch.nn.functional.linear(x, weight, bias)
    if activation is not None:
        return gated_activation(workspace, y, activation)
    return y if residual is None else residual + y


def _product(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """residual + x @ weightᵀ, in residual's place when there is one."""
    y = workspace.products.multiply(x, weight, residual) if workspace.products is not None else None
    if y is not None:
        return y
    if residual is None:
        return torch.nn.functional.linear(x, weight)
    return torch.addmm(residual, x, weight.t(), out=residual)


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "invariant_few",
            _not_invariant_few,
            _invariant_few_config,
            _stream,
            "docs/performance.md, batch-invariant mode",
        ),
        Variant(
            "invariant_gated",
            _not_invariant_gated,
            lambda problem: GatedPersistentTile(),
            _gated_persistent,
            "docs/performance.md, batch-invariant mode",
        ),
        Variant(
            "invariant_many",
            _not_invariant_many,
            _invariant_many_config,
            _persistent,
            "docs/performance.md, batch-invariant mode",
        ),
        Variant(
            "invariant",
            lambda problem: None if problem.deterministic else "for runtime.deterministic",
            lambda problem: invariant.tile(problem.rows, problem.outputs, problem.activation, problem.dtype),
            _tiles,
            "where the copy engine has no part: each output is the same sum in any batch; docs/performance.md",
        ),
        Variant(
            "warp_specialized",
            _not_warp_specialized,
            lambda problem: warp_specialized_tile(*problem.sizes),
            _warp_specialized,
            "docs/experiments/2026-11-20-decode-products.md (linear-fed.jsonl)",
        ),
        Variant(
            "stream",
            _not_streamed,
            lambda problem: stream_tile(*problem.sizes),
            _stream,
            "docs/experiments/2026-11-20-decode-products.md (linear-stream-tiles.jsonl)",
        ),
        Variant(
            "gated_persistent",
            _not_gated_persistent,
            _gated_persistent_config,
            _gated_persistent,
            "docs/experiments/2026-11-21-prompt-products.md (linear-held.jsonl)",
        ),
        Variant(
            "vector",
            _not_vector,
            _vector_config,
            _vector,
            "docs/experiments/2026-11-20-decode-products.md (linear-tiles-qwen3-4b.jsonl)",
        ),
        Variant(
            "few_rows",
            _not_few_rows,
            lambda problem: few_rows_tile(problem.rows, problem.outputs, problem.activation is not None, problem.table),
            _tiles,
            "where there is no WGMMA; tiles by perf.tune.linear (linear-tiles-qwen3-4b.jsonl)",
        ),
        Variant(
            "library",
            lambda problem: None,
            lambda problem: None,
            library,
            "docs/experiments/2026-11-21-prompt-products.md (linear-library.jsonl), kernels/tuned/h200.json",
        ),
    ]
)
