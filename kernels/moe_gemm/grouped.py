# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of many pairs with their experts' matrices on Hopper, in Gluon: a group of warps reads, two multiply.

A tile is up to 128 pairs that share an expert, by 256 rows of its matrix. The pairs of a tile stand together and tiles
one after another (`order.placed`), so that between the two products, and behind them, whole tiles are written and read
by the bulk copy engine (TMA); only the first product fetches its inputs row by row from where the tokens stand. Copies
run ahead across the border of tiles, as far as the ring in shared memory allows.

Each group of four warps multiplies 64 pairs by all 256 rows. A tile of 64 pairs or fewer takes half of the time: there
each group takes half of the rows. Since tiles differ, a program takes its next one from a counter of all programs.

Bound by reading the matrices below about a hundred pairs an expert, and from a few thousand tokens on by the power that
the chip may draw: its clock falls, and fewer cycles save little. Rows of a tile without a pair are zeros, not fetched.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper import boxes, emit, halves, load_box, load_pointers, next_stage, sync
from kernels.moe_gemm.order import Places
from kernels.moe_gemm.tiles import combined

# Pairs of a tile, inputs of a slice; a box of the copy engine is 64 × 64, or a tile's rows of one matrix by 64.
PAIRS, ROWS, BOX = 128, 256, 64
# Slices that shared memory holds.
STAGES = 4
# Registers of a thread before they are dealt out anew: 65,536 over three groups of warps, in steps of 8.
REGISTERS = 168


@gluon.jit
def _feed(
    x, x_desc, w_desc, tokens, tile_expert, tile_pairs, turns, x_ring, w_ring, full, empty, tasks, works, last, columns,
    slices, hidden, expert_rows, up_row,
    GATHER: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring: a stage holds two boxes of pairs and 256 rows of the matrix (64 of gate and of up in turn, when
    GATED). GATHER: pairs come from their tokens' rows of x, one copy for 16 bytes, and zeros stand where there is none.

    A stage's entry of `tasks` is written where a tile begins: 2 · work + (more than 64 pairs), or −1 behind the last
    one. Turns and tiles are looked up while the tile before is fetched."""
    W_BYTES: gl.constexpr = 256 * 64 * 2
    BOX_BYTES: gl.constexpr = 64 * 64 * 2
    CHANNELS: gl.constexpr = 128 if GATED else 256
    WARPS: gl.constexpr = 4 if GATHER else 1
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if GATHER:
        place = gl.arange(0, 64, gl.SliceLayout(1, spread))
        channel = gl.arange(0, 64, gl.SliceLayout(0, spread))[None, :]
    programs = gl.num_programs(0)
    work = gl.program_id(0)
    stage = work * 0
    phase = stage + 1
    following = gl.minimum(work // columns, last)
    next_pairs = gl.load(tile_pairs + following)
    next_expert = gl.load(tile_expert + following)
    if GATHER:
        next_lower = gl.load(tokens + following * 128 + place)
        next_upper = gl.load(tokens + following * 128 + 64 + place)
    next_work = programs + gl.atomic_add(turns, 1, sem="relaxed")
    while work < works:
        tile = work // columns
        pairs = next_pairs
        row = next_expert * expert_rows + work % columns * CHANNELS
        if GATHER:
            lower = x + (gl.where(place < pairs, next_lower, 0).to(gl.int64) * hidden)[:, None] + channel
            upper = x + (gl.where(place + 64 < pairs, next_upper, 0).to(gl.int64) * hidden)[:, None] + channel
        following = gl.minimum(next_work // columns, last)
        next_pairs = gl.load(tile_pairs + following)
        next_expert = gl.load(tile_expert + following)
        if GATHER:
            next_lower = gl.load(tokens + following * 128 + place)
            next_upper = gl.load(tokens + following * 128 + 64 + place)
        mbarrier.wait(empty.index(stage), phase)
        tasks.index(stage).store(gl.full([1], work * 2 + (pairs > 64).to(gl.int32), gl.int32, one))
        sync()
        work = next_work
        next_work = programs + gl.atomic_add(turns, 1, sem="relaxed")
        for slice_ in range(slices):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            at = slice_ * 64
            if GATHER:
                mbarrier.expect(bar, W_BYTES)
            elif pairs > 64:
                mbarrier.expect(bar, W_BYTES + 2 * BOX_BYTES)
            else:
                mbarrier.expect(bar, W_BYTES + BOX_BYTES)
            w = w_ring.index(stage)
            if GATED:
                for part in gl.static_range(4):
                    load_box(w_desc, [row + part // 2 * 64 + part % 2 * up_row, at], bar, w.slice(part * 64, 64))
            else:
                load_box(w_desc, [row, at], bar, w)
            if GATHER:
                load_pointers(x_ring.index(stage * 2), lower + at, mask=(place < pairs)[:, None])
                if pairs > 64:
                    load_pointers(x_ring.index(stage * 2 + 1), upper + at, mask=(place + 64 < pairs)[:, None])
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                load_box(x_desc, [tile * 128, at], bar, x_ring.index(stage * 2))
                if pairs > 64:
                    load_box(x_desc, [tile * 128 + 64, at], bar, x_ring.index(stage * 2 + 1))
            stage, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(empty.index(stage), phase)
    tasks.index(stage).store(gl.full([1], -1, gl.int32, one))
    sync()
    mbarrier.expect(full.index(stage), 0)
    if GATHER:
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def ring_product(
    x_ring, w_ring, full, empty, stage, phase, slices,
    HALF: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Pairs of box HALF by ROWS rows of the matrix from FIRST on: [64, ROWS], and where the ring stands then."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc = gl.zeros((64, ROWS), gl.float32, mma)
    for _ in range(slices):
        mbarrier.wait(full.index(stage), phase)
        if GATHER:
            # copies of single threads are seen by the matrix unit behind a fence
            fence_async_shared()
        w = w_ring.index(stage).slice(FIRST, ROWS)
        token = warpgroup_mma(x_ring.index(stage * 2 + HALF), w.permute((1, 0)), acc, is_async=True)
        # the other group's products fill the matrix unit while this one waits for its own
        acc = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _activate(x, KIND: gl.constexpr):
    """`linear.stream.activate` in half of the instructions; what they differ by is lost when h is rounded."""
    z = x
    if KIND != "silu":
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    sigmoid = gl.inline_asm_elementwise(
        """{
        .reg .f32 a;
        mul.f32 a, $1, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 a, a;
        add.f32 a, a, 0f3F800000;
        rcp.approx.ftz.f32 $0, a;
        }""",
        "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return x * sigmoid


@gluon.jit
def _gated(acc, limit, ACT: gl.constexpr, LIMITED: gl.constexpr):
    """act(gate) ∘ up of [64, 128]: 64 columns of gate, 64 of up."""
    gate, up = halves(acc, 64)
    if LIMITED:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    return _activate(gate, ACT) * up


@gluon.jit
def _whole(
    y_desc, x_ring, w_ring, out, full, empty, stage, phase, tile, column, slices, limit,
    ACT: gl.constexpr, LIMITED: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """64 pairs of a tile of more by all rows of the matrix."""
    row = tile * 128 + TEAM * 64
    acc, stage, phase = ring_product(x_ring, w_ring, full, empty, stage, phase, slices, TEAM, 0, 256, GATHER, STAGES)
    left, right = halves(acc, 128)
    if ACT is not None:
        y = _gated(left, limit, ACT, LIMITED)
        z = _gated(right, limit, ACT, LIMITED)
        emit(y_desc, out, 2 * TEAM, row, column * 128, (y, z))
    else:
        emit(y_desc, out, 2 * TEAM, row, column * 256, halves(left, 64))
        emit(y_desc, out, 2 * TEAM, row, column * 256 + 128, halves(right, 64))
    return stage, phase


@gluon.jit
def _short(
    y_desc, x_ring, w_ring, out, full, empty, stage, phase, tile, column, slices, limit,
    ACT: gl.constexpr, LIMITED: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """A tile of up to 64 pairs by half of the rows of the matrix."""
    row = tile * 128
    acc, stage, phase = ring_product(
        x_ring, w_ring, full, empty, stage, phase, slices, 0, TEAM * 128, 128, GATHER, STAGES
    )
    if ACT is not None:
        emit(y_desc, out, 2 * TEAM, row, column * 128 + TEAM * 64, (_gated(acc, limit, ACT, LIMITED),))
    else:
        emit(y_desc, out, 2 * TEAM, row, column * 256 + TEAM * 128, halves(acc, 64))
    return stage, phase


@gluon.jit
def _task(tasks, full, stage, phase):
    """What the tile is that begins in a stage."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(full.index(stage), phase)
    return gl.max(tasks.index(stage).load(one), 0)


@gluon.jit
def _multiply(
    y_desc, x_ring, w_ring, out, full, empty, tasks, columns, slices, limit,
    ACT: gl.constexpr, LIMITED: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """One group of warps: its part of every tile of its program."""
    stage = columns * 0
    phase = stage
    task = _task(tasks, full, stage, phase)
    while task >= 0:
        tile = (task >> 1) // columns
        column = (task >> 1) % columns
        if (task & 1) == 1:
            stage, phase = _whole(
                y_desc, x_ring, w_ring, out, full, empty, stage, phase, tile, column, slices, limit,
                ACT, LIMITED, GATHER, STAGES, TEAM,
            )  # fmt: skip
        else:
            stage, phase = _short(
                y_desc, x_ring, w_ring, out, full, empty, stage, phase, tile, column, slices, limit,
                ACT, LIMITED, GATHER, STAGES, TEAM,
            )  # fmt: skip
        task = _task(tasks, full, stage, phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "tiles", "columns", "slices", "expert_rows", "up_row"])
def grouped_kernel(
    x, x_desc, w_desc, y_desc, tokens, tile_expert, tile_pairs, ends, turns, num_experts, tiles, columns, slices,
    hidden, expert_rows, up_row, limit,
    GATHER: gl.constexpr, ACT: gl.constexpr, LIMITED: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[place] = act(x · gate) ∘ (x · up), or x · matrix without ACT, for `columns` columns of tiles.

    An expert has expert_rows rows of the matrix, those of up begin up_row behind those of gate. GATHER: x [T, hidden]
    is read at the place's token, else x_desc at the place. `tiles` bounds the number of tiles; `turns`: a zero.
    """
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, 64, 64], y_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 256, 64], w_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [4, 64, 64], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tasks = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ARRIVALS: gl.constexpr = 129 if GATHER else 1
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    works = gl.load(ends + num_experts - 1) * columns
    gl.warp_specialize(
        [
            (_multiply, (y_desc, x_ring, w_ring, out, full, empty, tasks, columns, slices, limit,
                         ACT, LIMITED, GATHER, STAGES, 0)),
            (_multiply, (y_desc, x_ring, w_ring, out, full, empty, tasks, columns, slices, limit,
                         ACT, LIMITED, GATHER, STAGES, 1)),
            (_feed, (x, x_desc, w_desc, tokens, tile_expert, tile_pairs, turns, x_ring, w_ring, full, empty, tasks,
                     works, tiles - 1, columns, slices, hidden, expert_rows, up_row, GATHER, ACT is not None, STAGES)),
        ],
        [4, 4] if GATHER else [4, 1],
        [232, 40] if GATHER else [240, 24],
    )  # fmt: skip


def grouped_fits(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Whether the copy engine can read and write all of it, in whole slices of inputs."""
    sizes = x.shape[1], gate_up.shape[1] // 2
    return group_products(x.device) and x.element_size() == 2 and all(size % BOX == 0 for size in sizes)


def grouped_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    gelu: bool,
    limit: float | None,
    places: Places,
    pdl: bool,
) -> torch.Tensor:
    """`moe_gemm` for many pairs of each expert, whose `places` are in tiles of PAIRS, where `grouped_fits`. Every shape
    that a launch depends on is known to the host, so that graphs can hold it."""
    hidden, inter, e = x.shape[1], gate_up.shape[1] // 2, gate_up.shape[0]
    rows = places.tiles * PAIRS
    h = torch.empty(rows, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    lists = (places.tokens, places.tile_expert, places.tile_pairs, places.ends)

    def product(
        source: torch.Tensor, table: torch.Tensor, target: torch.Tensor, act: str | None, turns: torch.Tensor
    ) -> None:
        matrix, size = table.flatten(0, 1), table.shape[2]
        columns = triton.cdiv(target.shape[1], ROWS if act is None else ROWS // 2)
        grouped_kernel[(min(multiprocessors(x.device), places.tiles * columns),)](
            source, boxes(source, BOX, BOX), boxes(matrix, ROWS if act is None else BOX, BOX), boxes(target, BOX, BOX),
            *lists, turns, e, places.tiles, columns, size // BOX, size, table.shape[1], inter,
            0.0 if limit is None else limit,
            GATHER=act is not None, ACT=act, LIMITED=limit is not None, STAGES=STAGES, PDL=pdl,
            num_warps=4, maxnreg=REGISTERS, launch_pdl=pdl,
        )  # fmt: skip

    first, second = places.turns.unbind()
    product(x, gate_up, h, "gelu_tanh" if gelu else "silu", first)
    product(h, down, y, None, second)
    return combined(y, places.rows, experts, weights, residual, e, x.dtype, pdl)
