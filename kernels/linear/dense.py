"""Matrix product with dense weights stored as [out, in], fused with its neighbours when there are few rows.

One row: a Triton matrix-vector kernel (`skinny`). Up to 64 rows: on Hopper a Gluon kernel that streams the weight
through shared memory (`stream`, or `warp_specialized` with a warp that does nothing but ask for it), elsewhere Triton
tiles (`skinny`). Many rows: cuBLAS, with norm and activation as kernels of their own, and with algorithms that were
measured (`tuned_gemms`); on Hopper a Gluon kernel has the activation inside (`gated_persistent`) where its tiles fill
the GPU. The thresholds and tiles were measured on an H200, most by `perf.tune.linear`.
"""

from __future__ import annotations

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.hardware import group_products, multiprocessors
from kernels.linear.gated_persistent import GatedPersistentTile, gated_persistent_fits, gated_persistent_linear
from kernels.linear.skinny import INTERPRETED, Tile, VectorTile, counters, tile_linear, vector_linear
from kernels.linear.stream import StreamTile, stream_linear, streams
from kernels.linear.warp_specialized import WarpSpecializedTile, warp_specialized_linear
from kernels.linear.waves import filled
from kernels.rms_norm.kernel import rms_norm
from kernels.sizes import cdiv
from kernels.weight import Dense
from kernels.workspace import Workspace

STREAM_ROWS = 64
GATED_PERSISTENT_ROWS, ALL_GATED_PERSISTENT_ROWS = 512, 2048
INVARIANT_ROWS = 256
FEW_ROWS = 16
TILE_ROWS = 32
WARP_SPECIALIZED_ROWS = 32
HEAD_OUTPUTS = 1 << 16
FEW_INPUTS, MIDDLE_INPUTS, MANY_INPUTS = 2048, 4096, 12288


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: Dense,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """y = residual + act(norm(x) @ weightᵀ + bias), each of norm, bias, act and residual only when it is given.

    Shapes as in the reference; weight is contiguous, rows of x and residual may be strided. Up to 64 rows of a 16-bit
    type take one kernel, which rounds once, at the end; so do many rows behind an activation. float32 goes to cuBLAS at
    any size. y may stand in residual's place. An activation excludes a residual.
    """
    rows, data = x.shape[0], weight.data
    n = data.shape[0] // (2 if activation else 1)
    if not rows:
        return x.new_zeros((0, n))
    fused_norm = norm_weight is not None and rows == 1 and not deterministic
    narrow = x.dtype != torch.float32 or INTERPRETED
    fits = rows <= FEW_ROWS or (rows <= TILE_ROWS and n < HEAD_OUTPUTS)
    if norm_weight is not None and not (fused_norm and narrow):
        x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
        norm_weight = None
    if deterministic:
        tile = invariant_tile(rows, n, activation, x.dtype)
        return tile_linear(workspace, x, data, bias, None, eps, offset, residual, activation, tile)
    if 1 < rows <= STREAM_ROWS and group_products(x.device) and streams(x, data):
        warp_specialized = warp_specialized_tile(
            rows, n, data.shape[1], activation is not None, multiprocessors(x.device)
        )
        if warp_specialized is not None:
            return warp_specialized_linear(
                workspace, x, data, bias, residual, activation, warp_specialized, counters(workspace)
            )
        stream = stream_tile(rows, n, data.shape[1], activation is not None, multiprocessors(x.device))
        return stream_linear(workspace, x, data, bias, residual, activation, stream, counters(workspace))
    if (
        activation is not None
        and rows > STREAM_ROWS
        and group_products(x.device)
        and gated_persistent_fits(x, data, bias)
    ):
        gated_persistent = gated_persistent_tile(rows, n, data.shape[1], multiprocessors(x.device))
        if gated_persistent is not None:
            return gated_persistent_linear(workspace, x, data, activation, gated_persistent)
    if not (narrow and fits):
        return _library(workspace, x, data, bias, residual, activation)
    if rows == 1:
        vector = vector_tile(n, data.shape[1], norm_weight is not None, activation is not None)
        return vector_linear(workspace, x, data, bias, norm_weight, eps, offset, residual, activation, vector)
    tile = _tile(rows, n, activation is not None)
    return tile_linear(workspace, x, data, bias, None, eps, offset, residual, activation, tile)


def vector_tile(n: int, k: int, norm: bool, activation: bool) -> VectorTile:
    if activation:
        return VectorTile(4, 256, 4, stages=5)
    if k >= MANY_INPUTS or n >= HEAD_OUTPUTS:
        return VectorTile(8, 256, 4, stages=5)
    if norm:
        if k > FEW_INPUTS:
            return VectorTile(8, 256, 4)
        return VectorTile(8, 512, 4) if n <= 4096 else VectorTile(4, 1024, 4)
    return VectorTile(1, 2048, 4) if k == 2048 else VectorTile(2, 1024, 4)


def stream_tile(rows: int, n: int, k: int, activation: bool, multiprocessors: int) -> StreamTile:
    """Tiles of 64 outputs, rings as deep as shared memory allows (half of that where two programs share it).

    Fewer tiles than multiprocessors are cut into slices, so that nearly all have one; more of them, and sizes at which
    adding slices up costs little, are cut into equal ranges.
    """
    height = next(h for h in (8, 16, 32, STREAM_ROWS) if rows <= h)
    if activation:
        if height == STREAM_ROWS:
            return StreamTile(height, 64, 128, 2, split=1)
        return StreamTile(height, 64, 128, 5) if height == 32 else StreamTile(height, 64, 256, 3)
    if n >= HEAD_OUTPUTS:
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
    rows: int, n: int, k: int, activation: bool, multiprocessors: int
) -> WarpSpecializedTile | None:
    """None where a warp of its own for loads did not gain at 40 to 64 rows, and for sizes that were not measured.

    Of few inputs a program takes whole tiles: adding parts up took longer than the multiprocessors left idle.
    """
    if rows <= WARP_SPECIALIZED_ROWS:
        return None
    if activation:
        return WarpSpecializedTile(2, 2) if k >= MIDDLE_INPUTS else None
    split = multiprocessors // cdiv(n, 64)
    if not 2 <= split <= 4:
        return None
    if k <= FEW_INPUTS:
        return WarpSpecializedTile(9, 4)
    # all of a program's weights stand in its ring before the wait
    return WarpSpecializedTile(8, 3, split) if k <= 1024 * split else None


def gated_persistent_tile(rows: int, n: int, k: int, multiprocessors: int) -> GatedPersistentTile | None:
    """None where the library is faster: it fills a GPU at any size, and pays 256/k of its time for the activation.

    From ALL_GATED_PERSISTENT_ROWS on there are so many tiles that it no longer matters how the last wave is filled; a
    warm-up of that many rows then knows the kernel.
    """
    if rows >= ALL_GATED_PERSISTENT_ROWS or (
        rows >= GATED_PERSISTENT_ROWS and filled(rows, n, multiprocessors) * (1 + 256 / k) >= 1
    ):
        return GatedPersistentTile()
    return None


def _tile(rows: int, n: int, activation: bool) -> Tile:
    """Narrow outputs are split over the inputs, so that there are programs for every multiprocessor."""
    if rows <= FEW_ROWS:
        if n >= HEAD_OUTPUTS:
            return Tile(16, 32, 256, prefetch=256)
        if activation:
            return Tile(16, 64, 128, stages=4, swap=True)
        if n > 4096:
            return Tile(16, 64, 128, stages=6, swap=True, prefetch=256)
        return Tile(16, 32, 128, split=4, stages=6, prefetch=256)
    if activation:
        return Tile(32, 64, 128, stages=3, warps=8, prefetch=256)
    return Tile(32, 64, 128, split=2 if n <= 4096 else 1, stages=6, swap=True, prefetch=256)


def invariant_tile(rows: int, n: int, activation: str | None, dtype: torch.dtype) -> Tile:
    """Tiles whose every output is the same sum in the same order: slices of 64·i inputs, added in turn. Programs that
    share a gated output's inputs would have to share both of its halves: those take one slice.

    Few rows take a slice a program, many rows take the slices one after another; a slice's own sum goes through the
    tensor cores 16 inputs at a time either way. float32 has no room for the deepest pipelines.
    """
    slices = 4 if n <= 4096 and activation is None else 1
    narrow = dtype != torch.float32
    if rows <= INVARIANT_ROWS:
        height = 16 if rows <= FEW_ROWS else 64 if rows <= STREAM_ROWS else 128
        stages = (4 if activation else 6) if narrow else 3
        return Tile(height, 64, 64, split=slices, stages=stages, swap=True, prefetch=256)
    wide = narrow and slices == 1 and activation is None
    return Tile(128, 256 if wide else 128, 64, serial=slices, stages=3, warps=8)


def _library(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
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
