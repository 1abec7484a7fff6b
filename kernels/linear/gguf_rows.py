# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for weights in blocks of GGUF files: the product of few rows, which reads them packed, and a weight's
numbers, for products of many rows and for embeddings.

A tile's numbers (`kernels.linear.gguf_blocks`) are scaled in float32 and rounded once to the dtype that products are
taken in; tensor cores have the weight on their long side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import shared_bytes
from kernels.linear.fp8_rows import RowTile, options, shared_tiles
from kernels.linear.gguf_blocks import PLAIN, WIDTH, block_numbers, constants, stride, views
from kernels.linear.slices import store_tile
from kernels.pipeline import fitting_stages
from kernels.sizes import cdiv
from kernels.weight import GgufBlocks
from kernels.workspace import Workspace


@triton.jit(do_not_specialize=["M"])
def gguf_kernel(
    x_ptr, data_ptr, short_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, B, x_stride, y_stride, residual_stride,
    FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BM rows of BN outputs over a slice of K; grid (N/BN, M/BM, SPLIT). The last slice to finish sums all in order.

    With ACT, N counts outputs and the weight has 2N rows; SPLIT is 1 then.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    live, some = n < N, m < M
    reach = tl.cdiv(K, BK * SPLIT) * BK
    start = tl.program_id(2) * reach
    stop = tl.minimum(start + reach, K)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    row = n.to(tl.int64) * B
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = acc
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for at in tl.range(start, stop, BK, num_stages=STAGES):
        inside = at + k < K
        x = tl.load(x_rows + (at + k)[None, :], mask=some[:, None] & inside[None, :], other=0.0)
        w = block_numbers(data_ptr, short_ptr, row, at, live, K, FORMAT, VALUES, SIZE, GROUP, BN, BK)
        acc += tl.dot(w.to(dtype), tl.trans(x), input_precision=DOT)
        if ACT is not None:
            up_row = (n + N).to(tl.int64) * B
            w = block_numbers(data_ptr, short_ptr, up_row, at, live, K, FORMAT, VALUES, SIZE, GROUP, BN, BK)
            acc_up += tl.dot(w.to(dtype), tl.trans(x), input_precision=DOT)
    store_tile(
        acc, acc_up, n, m, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr, M, N, y_stride, residual_stride,
        SPLIT, ACT, BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def numbers_kernel(
    ids_ptr, data_ptr, short_ptr, w_ptr, N, R, K, B, w_stride, factor,
    FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    IDS: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """w [N, K]: a tile of rows 0 to N of the weight's R, or of rows `ids`, times the factor behind rounding. A row that
    is not there is zero."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.program_id(1) * BK
    live = n < N
    k = at + tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = tl.load(ids_ptr + n, mask=live, other=0).to(tl.int64) if IDS else n.to(tl.int64)
    held = live & (source >= 0) & (source < R)
    w = block_numbers(data_ptr, short_ptr, source * B, at, held, K, FORMAT, VALUES, SIZE, GROUP, BN, BK)
    w = w.to(w_ptr.dtype.element_ty)
    if SCALED:
        w = (w.to(tl.float32) * factor).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + n.to(tl.int64)[:, None] * w_stride + k[None, :], w, mask=live[:, None] & (k < K)[None, :])


def _stages(x: torch.Tensor, name: str, tile: RowTile, wide: int) -> int:
    """The depth at which the tile's pipeline fits. wide: rows of the weight an output."""
    form, numbers = constants(name), tile.outputs * WIDTH
    blocks, rows = wide * numbers * form["SIZE"] // form["VALUES"], tile.rows * WIDTH * x.element_size()
    # numbers in x's dtype stand beside what was loaded, unless that is the same
    made = 0 if PLAIN.get(name) == x.dtype else numbers * x.element_size()
    return fitting_stages(tile.stages, blocks + rows, shared_bytes(x.device), made)


def rows_product(
    workspace: Workspace,
    x: torch.Tensor,
    part: torch.Tensor,
    name: str,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: str | None,
    tile: RowTile,
) -> None:
    """y [T, N] of x [T, K] and rows `part` in one format; y's and residual's rows may be strided, residual may be y."""
    (rows, n), k = y.shape, x.shape[1]
    partials, counts = shared_tiles(workspace, y, tile)
    workspace.launch(gguf_kernel, tile.grid(y))(
        x, *views(part, name), bias, residual, y, partials, counts,
        rows, n, k, stride(part, name), x.stride(0), y.stride(0), 0 if residual is None else residual.stride(0),
        **constants(name),
        BK=WIDTH, STAGES=_stages(x, name, tile, 2 if activation else 1),
        **options(workspace, x.dtype, bias, residual, activation, tile),
    )  # fmt: skip


def write_numbers(
    workspace: Workspace,
    part: torch.Tensor,
    name: str,
    w: torch.Tensor,
    ids: torch.Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """w [N, K] takes the numbers of `part`'s rows, or of its rows `ids` [N], in w's dtype."""
    n, k = w.shape
    if not n:
        return
    height = 16 if ids is not None else 64
    workspace.launch(numbers_kernel, (cdiv(n, height), cdiv(k, WIDTH)))(
        ids, *views(part, name), w, n, len(part), k, stride(part, name), w.stride(0), factor, **constants(name),
        IDS=ids is not None, SCALED=factor != 1.0, BN=height, BK=WIDTH, PDL=workspace.pdl, launch_pdl=workspace.pdl,
        num_warps=4,
    )  # fmt: skip


def unpacked(workspace: Workspace, weight: GgufBlocks, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [N, K] of a matrix in `dtype`."""
    w = torch.empty(weight.shape, dtype=dtype, device=weight.parts[0].device)
    start = 0
    for part, name in zip(weight.parts, weight.formats, strict=True):
        write_numbers(workspace, part, name, w[start : start + len(part)])
        start += len(part)
    return w
