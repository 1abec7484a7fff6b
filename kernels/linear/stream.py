# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of 2 to 64 rows with a large weight on Hopper, in Gluon: the weight streams through shared memory.

Weight tiles are the long side of the matrix unit (64 outputs an instruction), the rows of x its short side. The bulk
copy engine (TMA) fills a ring of tiles in shared memory; its first tiles are asked for before the kernel before has
finished, so the memory never waits for a launch, a norm or the last sums of another product.

Work is cut evenly whatever the shape: the tiles' slices of inputs stand in one row, and every program takes an equal
range of it (stream-K, Osama et al. 2023, arXiv:2301.03598). A tile that several programs share is summed by the last
of them to finish, in the order of the inputs, so the result does not depend on which one that is.
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
from kernels.hopper import boxes, load_box, sync
from kernels.sizes import cdiv
from kernels.workspace import Workspace


@gluon.jit
def first_unit(program, units, programs):
    """The first unit of a program's range."""
    return program * units // programs


@gluon.jit
def unit_owner(unit, units, programs):
    """The program whose range holds `unit`."""
    return ((unit + 1) * programs - 1) // units


@gluon.jit
def activate(x, KIND: gl.constexpr):
    """KIND of x, float32: "silu" or "gelu_tanh"."""
    if KIND == "silu":
        return x / (1.0 + gl.exp(-x))
    # gelu_tanh; tanh(z) = 2·sigmoid(2z) − 1
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + gl.exp(-2.0 * inner))


@gluon.jit
def ask_weight(w_desc, bars, w_ring, stage, tile, slice_, up_row, live, BYTES: gl.constexpr,
                BN: gl.constexpr, BK: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """Ask for a unit's weights (gate and up when GATED); its barrier expects the unit's x too."""
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=live)
    if GATED:
        load_box(w_desc, [tile * BN, slice_ * BK], bar, w_ring.index(2 * stage), pred=live)
        load_box(w_desc, [up_row + tile * BN, slice_ * BK], bar, w_ring.index(2 * stage + 1), pred=live)
    else:
        load_box(w_desc, [tile * BN, slice_ * BK], bar, w_ring.index(stage), pred=live)


@gluon.jit
def close_tile(
    acc, acc_up, tile, begin, end, slices, units, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, y_stride, residual_stride,
    SHARED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """What follows a tile's sums acc [BN, BM] of units begin to end, of `slices` a tile: sharers' parts, bias,
    activation, residual. acc_up: the up half's sums, with ACT."""
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = acc.type.layout
    GATED: gl.constexpr = ACT is not None
    WIDE: gl.constexpr = 2 if GATED else 1
    WARPS: gl.constexpr = gl.num_warps()
    # parts of a shared tile that are read at once: as many as registers hold
    EACH: gl.constexpr = BN * BM * WIDE // (32 * WARPS)
    AT_ONCE: gl.constexpr = 8 if EACH <= 8 else (4 if EACH <= 16 else 1)
    VEC: gl.constexpr = 4 if BN * BM >= WARPS * 128 else 2
    flat: gl.constexpr = gl.BlockedLayout([VEC, 1], [16, 2], [1, WARPS], [0, 1])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, flat))
    m = gl.arange(0, BM, gl.SliceLayout(0, flat))
    live = (n < N)[:, None] & (m < M)[None, :]
    if RESIDUAL:
        spot = residual_ptr + m.to(gl.int64)[None, :] * residual_stride + n[:, None]
        add = gl.load(spot, mask=live, other=0.0)
    last = end - begin == slices
    if SHARED and end - begin < slices:
        cell = (
            gl.arange(0, BN, gl.SliceLayout(1, mma))[:, None] * BM + gl.arange(0, BM, gl.SliceLayout(0, mma))[None, :]
        )
        opens = (begin == tile * slices).to(gl.int32)
        mine = partial_ptr + (2 * program + opens).to(gl.int64) * (WIDE * BN * BM)
        gl.store(mine + cell, acc)
        if GATED:
            gl.store(mine + BN * BM + cell, acc_up)
        one = unit_owner(tile * slices, units, programs)
        other = unit_owner((tile + 1) * slices - 1, units, programs)
        sync()
        last = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == other - one
        if last:
            acc = gl.zeros((BN, BM), gl.float32, mma)
            acc_up = acc
            for some in range(one, other + 1, AT_ONCE):
                for place in gl.static_range(AT_ONCE):
                    sharer = some + place
                    opens = (first_unit(sharer, units, programs) <= tile * slices).to(gl.int32)
                    theirs = partial_ptr + (2 * sharer + opens).to(gl.int64) * (WIDE * BN * BM)
                    held = (cell >= 0) & (sharer <= other)
                    acc += gl.load(theirs + cell, mask=held, other=0.0, cache_modifier=".cg")
                    if GATED:
                        acc_up += gl.load(theirs + BN * BM + cell, mask=held, other=0.0, cache_modifier=".cg")
            gl.store(count_ptr + tile, 0)
    if last:
        y = gl.convert_layout(acc, flat)
        if BIAS:
            y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            up = gl.convert_layout(acc_up, flat)
            if BIAS:
                up += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
            y = activate(y, ACT) * up
        if RESIDUAL:
            y += add.to(gl.float32)
        gl.store(y_ptr + m.to(gl.int64)[None, :] * y_stride + n[:, None], y.to(y_ptr.dtype.element_ty), mask=live)


@gluon.jit(do_not_specialize=["M"])
def stream_kernel(
    x_desc, w_desc, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, y_stride, residual_stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """M ≤ BM rows. With ACT, N counts outputs and the weight has 2N rows. SHARED: whether programs share tiles; then
    partial_ptr has room for a partial tile (two with ACT) for the first and for the last tile of each program, and
    count_ptr a zero for each tile."""
    GATED: gl.constexpr = ACT is not None
    WIDE: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (BN * WIDE + BM) * BK * 2
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = (K + BK - 1) // BK
    units = (N + BN - 1) // BN * slices
    first = first_unit(program, units, programs)
    stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WIDE, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(bars.index(place), count=1)
    fence_async_shared()

    ask_tile = first // slices
    ask_slice = first % slices
    x_slice = ask_slice
    for place in gl.static_range(STAGES):
        ask_weight(w_desc, bars, w_ring, place, ask_tile, ask_slice, N, first + place < stop, BYTES, BN, BK, GATED)
        ask_slice += 1
        ask_tile = gl.where(ask_slice == slices, ask_tile + 1, ask_tile)
        ask_slice = gl.where(ask_slice == slices, 0, ask_slice)
    if PDL:
        gdc_wait()
    for place in gl.static_range(STAGES):
        load_box(x_desc, [0, x_slice * BK], bars.index(place), x_ring.index(place), pred=first + place < stop)
        x_slice += 1
        x_slice = gl.where(x_slice == slices, 0, x_slice)

    turn = first * 0
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        acc = gl.zeros((BN, BM), gl.float32, mma)
        acc_up = acc
        for _ in range(begin, end):
            stage = turn % STAGES
            mbarrier.wait(bars.index(stage), (turn // STAGES) & 1)
            x = x_ring.index(stage).permute((1, 0))
            if GATED:
                token = warpgroup_mma(w_ring.index(2 * stage), x, acc, is_async=True)
                token_up = warpgroup_mma(w_ring.index(2 * stage + 1), x, acc_up, is_async=True)
                acc, acc_up = warpgroup_mma_wait(0, deps=[token, token_up])
            else:
                token = warpgroup_mma(w_ring.index(stage), x, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[token])
            sync()
            more = first + turn + STAGES < stop
            ask_weight(w_desc, bars, w_ring, stage, ask_tile, ask_slice, N, more, BYTES, BN, BK, GATED)
            load_box(x_desc, [0, ask_slice * BK], bars.index(stage), x_ring.index(stage), pred=more)
            ask_slice += 1
            ask_tile = gl.where(ask_slice == slices, ask_tile + 1, ask_tile)
            ask_slice = gl.where(ask_slice == slices, 0, ask_slice)
            turn += 1

        close_tile(
            acc, acc_up, tile, begin, end, slices, units, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
            M, N, y_stride, residual_stride, SHARED, ACT, BIAS, RESIDUAL,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamTile:
    """How `stream_kernel` is cut: rows, outputs and inputs a tile, tiles of the ring, programs, warps.

    Outputs are a multiple of 16 · warps, rows of 8; behind an activation a tile has as many rows of gate and of up.
    programs: of each multiprocessor, unless `split` says how many there are for each tile of outputs.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    programs: int = 1
    split: int = 0
    warps: int = 4


def streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the bulk copy engine can read both: 16-bit, whole rows on 16 bytes."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
        and weight.data_ptr() % 16 == 0
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What the programs of a launch write: `y` [M, n], and, where they share tiles of outputs, `partials` of these
    (else `y` again)."""

    programs: int
    shared: bool
    y: torch.Tensor
    partials: torch.Tensor


def work_of(
    x: torch.Tensor, n: int, rows: int, outputs: int, inputs: int, wide: int, split: int, most: int,
    dtype: torch.dtype | None = None,
) -> Work:  # fmt: skip
    """The work of x [M, k] and n outputs in tiles of `rows` by `outputs`, cut into slices of `inputs`: for `split`
    programs a tile, or for up to `most` that take equal ranges of all slices. A program has a partial tile, or
    `wide` of them, for its first and for its last tile. dtype: y's; None is x's."""
    m, k = x.shape
    tiles, slices = cdiv(n, outputs), cdiv(k, inputs)
    programs = min(tiles * slices, tiles * split if split else most)
    shared = programs > tiles or tiles % programs != 0
    y = torch.empty((m, n), dtype=dtype or x.dtype, device=x.device)
    cells = 2 * programs * wide * outputs * rows
    return Work(programs, shared, y, torch.empty(cells, dtype=torch.float32, device=x.device) if shared else y)


def stream_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, tile: StreamTile, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear` without a norm, for up to tile.rows rows; counts: zeros, one for each tile of outputs, left zero."""
    m, k = x.shape
    wide = 2 if activation else 1
    n = weight.shape[0] // wide
    most = tile.programs * multiprocessors(x.device)
    work = work_of(x, n, tile.rows, tile.outputs, tile.inputs, wide, tile.split, most)
    workspace.launch(stream_kernel, (work.programs,))(
        boxes(x, tile.rows, tile.inputs), boxes(weight, tile.outputs, tile.inputs),
        bias, residual, work.y, work.partials, counts,
        m, n, k, work.y.stride(0), residual.stride(0) if residual is not None else 0,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs, STAGES=tile.stages, SHARED=work.shared,
        ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl,
        num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
