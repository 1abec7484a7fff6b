# mypy: disable-error-code="no-untyped-def,attr-defined"
"""A Triton kernel for products of few rows with a weight of 8-bit floats or integers.

Inputs come as 8-bit numbers with scales, or as they are. Tensor cores multiply, with the weight on their long side;
each block of inputs that share a scale has a sum of its own, which is scaled and added up in float32. Narrow outputs
are split over the inputs (split-K), so that there are programs for every multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import shared_bytes
from kernels.linear.skinny import INTERPRETED, counters
from kernels.linear.slices import finished, summed
from kernels.pipeline import fitting_stages
from kernels.prefetch import prefetch
from kernels.sizes import cdiv
from kernels.weight import Fp8, Int8
from kernels.workspace import Workspace

GROUP = 128


def tile_inputs(weight: Fp8 | Int8) -> int:
    """Inputs of a tile: those that share a scale of the weight, where it has several a row (128, or 32 of MXFP8)."""
    return weight.block[1] if weight.scale.shape[-1] > 1 else GROUP


@dataclass(frozen=True, slots=True)
class RowTile:
    """Rows and outputs of a program, slices of the inputs, pipeline depth where it fits, warps."""

    rows: int
    outputs: int
    split: int
    stages: int
    warps: int = 4

    def grid(self, y: torch.Tensor) -> tuple[int, int, int]:
        """Of a product y [T, N]."""
        return cdiv(y.shape[1], self.outputs), cdiv(y.shape[0], self.rows), self.split


def shared_tiles(
    workspace: Workspace, y: torch.Tensor, tile: RowTile
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where programs that share tiles of y [T, N] put their sums, and count themselves; None where none do."""
    if tile.split == 1:
        return None, None
    return torch.empty(tile.split, *y.shape, dtype=torch.float32, device=y.device), counters(workspace)


def options(
    workspace: Workspace, dtype: torch.dtype, bias: torch.Tensor | None, residual: torch.Tensor | None,
    activation: str | None, tile: RowTile,
) -> dict[str, Any]:  # fmt: skip
    """What kernels of such tiles are launched with, whatever the weight. dtype: of x."""
    return {
        "BM": tile.rows,
        "BN": tile.outputs,
        "SPLIT": tile.split,
        "ACT": activation,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "PDL": workspace.pdl,
        "DOT": "ieee" if INTERPRETED or dtype == torch.float32 else "tf32",
        "launch_pdl": workspace.pdl,
        "num_warps": tile.warps,
    }


@triton.jit
def _product(w, x, scales, sx, at, live, BK: tl.constexpr, BLOCKED: tl.constexpr, GROUPED: tl.constexpr,
             WIDE: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    if WIDE:
        if w.dtype == tl.int8:
            w = w.to(tl.float32)
        partial = tl.dot(w.to(x.dtype), tl.trans(x), input_precision=DOT)
    else:
        # Of 128 products of 8-bit integers, which a float32 holds exactly.
        partial = tl.dot(w, tl.trans(x)).to(tl.float32)
    if BLOCKED:
        partial *= tl.load(scales + at // BK, mask=live, other=0.0)[:, None]
    if GROUPED:
        partial *= sx[None, :]
    return partial


@triton.jit(do_not_specialize=["M", "xs_row", "xs_group"])
def fp8_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, x_stride, xs_row, xs_group, y_stride, residual_stride, ws_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCKED: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BM rows of BN outputs over a slice of K; grid (N/BN, M/BM, SPLIT). The last slice to finish sums all in order.

    With ACT, N counts outputs and the weight has 2N rows; SPLIT is 1 then. BLOCKED: the weight has a scale for ROWS
    outputs and BK inputs, else one an output. GROUPED: x has a scale a row and BK inputs, else one a row; WIDE: x is as
    it is. EVEN: BN divides N and BK divides K.
    """
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(1)
    pid_k = tl.program_id(2)
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    live, some = n < N, m < M
    reach = tl.cdiv(K, BK * SPLIT) * BK
    start = pid_k * reach
    stop = tl.minimum(start + reach, K)
    rows = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    up_rows = rows + N.to(tl.int64) * K
    scales = ws_ptr + (n // ROWS).to(tl.int64) * ws_stride
    up_scales = ws_ptr + ((n + N) // ROWS).to(tl.int64) * ws_stride
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    if PDL:
        gdc_launch_dependents()
        cache_lines = start + tl.arange(0, 4) * BK
        prefetch(w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.minimum(cache_lines, K - 1)[None, :])
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = acc
    for at in tl.range(start, stop, BK, num_stages=STAGES):
        inside = (at + k < K)[None, :]
        w = tl.load(rows + at) if EVEN else tl.load(rows + at, mask=live[:, None] & inside, other=0.0)
        x = tl.load(x_rows + at, mask=some[:, None] & inside, other=0.0)
        sx = tl.zeros((BM,), tl.float32)
        if GROUPED:
            sx = tl.load(xs_ptr + m.to(tl.int64) * xs_row + at // BK * xs_group, mask=some, other=0.0)
        acc += _product(w, x, scales, sx, at, live, BK, BLOCKED, GROUPED, WIDE, DOT)
        if ACT is not None:
            up = tl.load(up_rows + at) if EVEN else tl.load(up_rows + at, mask=live[:, None] & inside, other=0.0)
            acc_up += _product(up, x, up_scales, sx, at, live, BK, BLOCKED, GROUPED, WIDE, DOT)
    y = tl.trans(acc)
    y_up = tl.trans(acc_up)
    spot = m.to(tl.int64)[:, None]
    stored = some[:, None] & live[None, :]
    last = True
    if SPLIT > 1:
        counter = count_ptr + pid_m * tl.num_programs(0) + pid_n
        cells = partial_ptr + spot * N + n[None, :]
        y, last = summed(y, cells, M.to(tl.int64) * N, counter, pid_k, stored, BM, BN, SPLIT)
    if last:
        if not BLOCKED:
            y *= tl.load(scales, mask=live, other=0.0)[None, :]
            if ACT is not None:
                y_up *= tl.load(up_scales, mask=live, other=0.0)[None, :]
        if not GROUPED and not WIDE:
            sx = tl.load(xs_ptr + m.to(tl.int64) * xs_row, mask=some, other=0.0)[:, None]
            y *= sx
            y_up *= sx
        y = finished(y, y_up, bias_ptr, residual_ptr, spot * residual_stride + n[None, :], N, n, live, stored, ACT,
                     BIAS, RESIDUAL)  # fmt: skip
        tl.store(y_ptr + spot * y_stride + n[None, :], y.to(y_ptr.dtype.element_ty), mask=stored)


def _stages(
    x: torch.Tensor, weight: Fp8 | Int8, tile: RowTile, width: int, wide: int, blocked: bool, grouped: bool
) -> int:
    """The depth at which the tile's pipeline fits. wide: rows of the weight an output. Others as the kernel's."""
    weights, rows = tile.outputs * width * weight.data.element_size(), tile.rows * width * x.element_size()
    scales = (4 * wide * tile.outputs if blocked else 0) + (4 * tile.rows if grouped else 0)
    # weights that are multiplied in x's dtype stand there in it as well
    widened = 0 if x.element_size() == 1 else tile.outputs * width * x.element_size()
    depth = 2 if x.dtype == torch.float32 else tile.stages
    return fitting_stages(depth, wide * weights + rows + scales, shared_bytes(x.device), widened)


def fp8_linear(
    workspace: Workspace,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    weight: Fp8 | Int8,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: str | None,
    tile: RowTile,
) -> None:
    """y [T, N] of x [T, K]. scales [T, groups] are those of x's numbers; None takes x as it is. residual may be y."""
    (rows, n), k = y.shape, x.shape[1]
    width, wide = tile_inputs(weight), 2 if activation else 1
    blocked, grouped = weight.scale.shape[1] > 1 or weight.block[0] > 1, scales is not None and scales.shape[1] > 1
    partials, counts = shared_tiles(workspace, y, tile)
    workspace.launch(fp8_kernel, tile.grid(y))(
        x, scales, weight.data, weight.scale, bias, residual, y, partials, counts,
        rows, n, k, x.stride(0), 0 if scales is None else scales.stride(0), 0 if scales is None else scales.stride(1),
        y.stride(0), 0 if residual is None else residual.stride(0), weight.scale.shape[1],
        BK=width, ROWS=weight.block[0],
        BLOCKED=blocked, GROUPED=grouped, WIDE=scales is None, EVEN=n % tile.outputs == 0 and k % width == 0,
        STAGES=_stages(x, weight, tile, width, wide, blocked, grouped),
        **options(workspace, x.dtype, bias, residual, activation, tile),
    )  # fmt: skip
