# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of 33 to 64 rows on Hopper, in Gluon, with a warp that does nothing but ask for memory.

Work is cut as in `stream`. There the warps that multiply also ask for slices, behind a barrier of all of them for each
slice; with 64 rows of x a slice is twice as many bytes. Here one warp asks for weights and x as soon as a product has
left its place, and never waits for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_box
from kernels.hopper.epilogue import activate, combine, upper_and_lower
from kernels.hopper.ring import barriers, cursor, load_gate_up, ring_of
from kernels.hopper.schedule import first_unit, next_slice, next_unit, work_of
from kernels.workspace import Workspace

# A tile: rows, outputs, inputs of a slice.
ROWS, OUTPUTS, INPUTS = 64, 64, 128
# Registers of a thread before they are dealt out anew: two programs of two groups of four warps fit a multiprocessor.
REGISTERS = 128


@gluon.jit
def _ask_weight(w_desc, full, w_ring, stage, tile, slice_, up_row, live, BN: gl.constexpr, BK: gl.constexpr,
                WIDE: gl.constexpr):  # fmt: skip
    """Asks for a unit's weights."""
    bar = full.index(stage)
    mbarrier.expect(bar, BN * WIDE * BK * 2, pred=live)
    load_gate_up(w_desc, tile * BN, up_row, slice_ * BK, bar, w_ring.index(stage), live, WIDE)


@gluon.jit
def rings(x_desc, w_desc, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
          X_STAGES: gl.constexpr):  # fmt: skip
    """Rings of weights and of x, the barriers of weights that are there, those of x, and that of a description."""
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES, BM, BK], x_desc.layout)
    w_full = barriers(STAGES, 1)
    x_bars = ring_of(X_STAGES, 1, 1)
    described = barriers(1, 1)
    fence_async_shared()
    return w_ring, x_ring, w_full, x_bars, described


@gluon.jit
def feed(x_desc, w_desc, x_ring, w_ring, w_full, x_bars, described, first, stop, slices, N,
         BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
         X_STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One warp: asks for all units, for the first weights before the kernel before has finished."""
    X_BYTES: gl.constexpr = BM * BK * 2
    tile = first // slices
    slice_ = first % slices
    x_slice = slice_
    # a box outside of x: its description comes now, not behind the wait
    mbarrier.expect(described.index(0), X_BYTES)
    load_box(x_desc, [BM, 0], described.index(0), x_ring.index(0))
    for place in gl.static_range(STAGES):
        _ask_weight(w_desc, w_full, w_ring, place, tile, slice_, N, first + place < stop, BN, BK, WIDE)
        tile, slice_ = next_unit(tile, slice_, slices)
    mbarrier.wait(described.index(0), 0)
    if PDL:
        gdc_wait()
    for place in gl.static_range(X_STAGES):
        live = first + place < stop
        mbarrier.expect(x_bars.full.index(place), X_BYTES, pred=live)
        load_box(x_desc, [0, x_slice * BK], x_bars.full.index(place), x_ring.index(place), pred=live)
        x_slice = next_slice(x_slice, slices)
    at = cursor(first * 0)
    x_at = cursor(first * 0)
    for unit in range(first, stop):
        x_bars.wait_empty(x_at)
        _ask_weight(w_desc, w_full, w_ring, at.stage, tile, slice_, N, unit + STAGES < stop, BN, BK, WIDE)
        more = unit + X_STAGES < stop
        mbarrier.expect(x_bars.full.index(x_at.stage), X_BYTES, pred=more)
        load_box(x_desc, [0, x_slice * BK], x_bars.full.index(x_at.stage), x_ring.index(x_at.stage), pred=more)
        x_slice = next_slice(x_slice, slices)
        tile, slice_ = next_unit(tile, slice_, slices)
        at = at.next(STAGES)
        x_at = x_at.next(X_STAGES)


@gluon.jit
def products(acc, x_ring, w_ring, w_full, x_bars, at, x_at, units, STAGES: gl.constexpr,
             X_STAGES: gl.constexpr):  # fmt: skip
    """acc [outputs, rows] and the products of the rings' next units, of which there is one at least, and where the
    rings stand then."""
    for unit in range(units):
        mbarrier.wait(w_full.index(at.stage), at.phase)
        x_bars.wait(x_at)
        x = x_ring.index(x_at.stage).permute((1, 0))
        token = warpgroup_mma(w_ring.index(at.stage), x, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[token])
        # the product before this one is done: its places are free
        x_bars.release(x_at.before(X_STAGES), live=unit > 0)
        at = at.next(STAGES)
        x_at = x_at.next(X_STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    x_bars.release(x_at.before(X_STAGES))
    return acc, at, x_at


@gluon.jit
def _multiply(x_ring, w_ring, w_full, x_bars, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
              M, N, y_stride, residual_stride, first, stop, slices, units, BM: gl.constexpr, BN: gl.constexpr,
              WIDE: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
              SHARED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
              PDL: gl.constexpr):  # fmt: skip
    """Four warps: the products of all units, and the results of their tiles."""
    if PDL:
        gdc_wait()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    at = cursor(first * 0)
    x_at = cursor(first * 0)
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        acc = gl.zeros((WIDE * BN, BM), gl.float32, mma)
        acc, at, x_at = products(acc, x_ring, w_ring, w_full, x_bars, at, x_at, end - begin, STAGES, X_STAGES)

        n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, flat))[:, None]
        m = gl.arange(0, BM, gl.SliceLayout(0, flat))[None, :]
        live = (n < N) & (m < M)
        if RESIDUAL:
            add = gl.load(residual_ptr + m.to(gl.int64) * residual_stride + n, mask=live, other=0.0)
        last = end - begin == slices
        if SHARED and end - begin < slices:
            last, sums = combine((acc,), tile, begin, slices, units, partial_ptr, count_ptr, AT_ONCE)
            acc = sums[0]
        if last:
            if ACT is not None:
                gate, up = upper_and_lower(acc, BN, BM)
                if BIAS:
                    across: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
                    row = tile * BN + gl.arange(0, BN, across)
                    gate += gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
                    up += gl.load(bias_ptr + N + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
                y = gl.convert_layout(activate(gate, ACT) * up, flat)
            else:
                y = gl.convert_layout(acc, flat)
                if BIAS:
                    y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
            if RESIDUAL:
                y += add.to(gl.float32)
            gl.store(y_ptr + m.to(gl.int64) * y_stride + n, y.to(y_ptr.dtype.element_ty), mask=live)


@gluon.jit(do_not_specialize=["M"])
def warp_specialized_kernel(
    x_desc, w_desc, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, y_stride, residual_stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr, SHARED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As `stream_kernel`, with rings of different depths for weights and x; AT_ONCE parts of a shared tile are read
    at once."""
    WIDE: gl.constexpr = 2 if ACT is not None else 1
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = (K + BK - 1) // BK
    units = (N + BN - 1) // BN * slices
    first = first_unit(program, units, programs)
    stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring, x_ring, w_full, x_bars, described = rings(x_desc, w_desc, BM, WIDE * BN, BK, STAGES, X_STAGES)
    gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, w_full, x_bars, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
                         M, N, y_stride, residual_stride, first, stop, slices, units, BM, BN, WIDE, STAGES, X_STAGES,
                         AT_ONCE, SHARED, ACT, BIAS, RESIDUAL, PDL)),
            (feed, (x_desc, w_desc, x_ring, w_ring, w_full, x_bars, described, first, stop, slices, N,
                    BM, BN, BK, WIDE, STAGES, X_STAGES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WarpSpecializedTile:
    """How `warp_specialized_kernel` is cut: slices of weights and of x in its rings, programs of each tile of outputs,
    0 for equal ranges of all tiles."""

    stages: int
    x_stages: int
    split: int = 1


def warp_specialized_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, tile: WarpSpecializedTile, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear` without a norm, for up to ROWS rows that `streams` allows; counts as in `stream_linear`."""
    m, k = x.shape
    wide = 2 if activation else 1
    n = weight.shape[0] // wide
    work = work_of(x, n, ROWS, OUTPUTS, INPUTS, wide, tile.split, multiprocessors(x.device))
    workspace.launch(warp_specialized_kernel, (work.programs,))(
        boxes(x, ROWS, INPUTS), boxes(weight, OUTPUTS, INPUTS),
        bias, residual, work.y, work.partials, counts,
        m, n, k, work.y.stride(0), residual.stride(0) if residual is not None else 0,
        BM=ROWS, BN=OUTPUTS, BK=INPUTS, STAGES=tile.stages, X_STAGES=tile.x_stages,
        AT_ONCE=4 if tile.split > 2 else 2, SHARED=work.shared,
        ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
