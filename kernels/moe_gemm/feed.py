# mypy: disable-error-code="no-untyped-def,attr-defined"
"""What fills the rings of products of many pairs: a tile's pairs, and the rows of its expert's matrix."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.compat import load_box, load_pointers, sync
from kernels.hopper.ring import filling_cursor
from kernels.hopper.schedule import tell


@gluon.jit
def _tell_tile(tasks, stage, work, pairs, expert, TOLD: gl.constexpr, WARPS: gl.constexpr):
    if TOLD == 1:
        tell(tasks.index(stage), work * 2 + (pairs > 64).to(gl.int32), WARPS)
    else:
        tell(tasks.index(stage * 3), work, WARPS)
        tell(tasks.index(stage * 3 + 1), pairs, WARPS)
        tell(tasks.index(stage * 3 + 2), expert, WARPS)
    sync()


@gluon.jit
def _look_up(tokens, tile_expert, tile_pairs, tile, place, GATHER: gl.constexpr):
    """A tile's pairs and its expert, and with GATHER the tokens of its two boxes."""
    pairs = gl.load(tile_pairs + tile)
    expert = gl.load(tile_expert + tile)
    lower = place
    upper = place
    if GATHER:
        lower = gl.load(tokens + tile * 128 + place)
        upper = gl.load(tokens + tile * 128 + 64 + place)
    return pairs, expert, lower, upper


@gluon.jit
def feed_pairs(
    x, x_desc, w_desc, tokens, tile_expert, tile_pairs, turns, x_ring, w_ring, ring, tasks, works, last, columns,
    slices, hidden, expert_rows, up_row,
    GATHER: gl.constexpr, GATED: gl.constexpr, TOLD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring: a stage of x_ring [2 · STAGES, 64, inputs] holds two boxes of pairs, of w_ring [STAGES, rows,
    inputs] rows of the matrix (64 of gate and of up in turn, when GATED). GATHER: pairs come from their tokens' rows of
    x, one copy for 16 bytes, and zeros stand where there is none.

    A stage's entries of `tasks`, TOLD of them, are written where a tile begins: 2 · work + (more than 64 pairs), or its
    work, its pairs and its expert; −1 in the first behind the last tile. Turns and tiles are looked up while the tile
    before is fetched."""
    ROWS: gl.constexpr = w_ring.shape[1]
    INPUTS: gl.constexpr = w_ring.shape[2]
    ITEM: gl.constexpr = w_ring.dtype.primitive_bitwidth // 8
    W_BYTES: gl.constexpr = ROWS * INPUTS * ITEM
    BOX_BYTES: gl.constexpr = 64 * INPUTS * ITEM
    CHANNELS: gl.constexpr = ROWS // 2 if GATED else ROWS
    WARPS: gl.constexpr = 4 if GATHER else 1
    spread: gl.constexpr = gl.BlockedLayout([1, 16 // ITEM], [4, 8], [WARPS, 1], [1, 0])
    place = gl.arange(0, 64, gl.SliceLayout(1, spread))
    if GATHER:
        channel = gl.arange(0, INPUTS, gl.SliceLayout(0, spread))[None, :]
    programs = gl.num_programs(0)
    work = gl.program_id(0)
    at = filling_cursor(work * 0)
    following = gl.minimum(work // columns, last)
    next_pairs, next_expert, next_lower, next_upper = _look_up(
        tokens, tile_expert, tile_pairs, following, place, GATHER
    )
    next_work = programs + gl.atomic_add(turns, 1, sem="relaxed")
    while work < works:
        tile = work // columns
        pairs = next_pairs
        expert = next_expert
        row = expert * expert_rows + work % columns * CHANNELS
        if GATHER:
            lower = x + (gl.where(place < pairs, next_lower, 0).to(gl.int64) * hidden)[:, None] + channel
            upper = x + (gl.where(place + 64 < pairs, next_upper, 0).to(gl.int64) * hidden)[:, None] + channel
        following = gl.minimum(next_work // columns, last)
        next_pairs, next_expert, next_lower, next_upper = _look_up(
            tokens, tile_expert, tile_pairs, following, place, GATHER
        )
        ring.wait_empty(at)
        _tell_tile(tasks, at.stage, work, pairs, expert, TOLD, WARPS)
        work = next_work
        next_work = programs + gl.atomic_add(turns, 1, sem="relaxed")
        for slice_ in range(slices):
            ring.wait_empty(at)
            bar = ring.full.index(at.stage)
            k = slice_ * INPUTS
            if GATHER:
                mbarrier.expect(bar, W_BYTES)
            elif pairs > 64:
                mbarrier.expect(bar, W_BYTES + 2 * BOX_BYTES)
            else:
                mbarrier.expect(bar, W_BYTES + BOX_BYTES)
            w = w_ring.index(at.stage)
            if GATED:
                for part in gl.static_range(4):
                    load_box(w_desc, [row + part // 2 * 64 + part % 2 * up_row, k], bar, w.slice(part * 64, 64))
            else:
                load_box(w_desc, [row, k], bar, w)
            if GATHER:
                load_pointers(x_ring.index(at.stage * 2), lower + k, mask=(place < pairs)[:, None])
                if pairs > 64:
                    load_pointers(x_ring.index(at.stage * 2 + 1), upper + k, mask=(place + 64 < pairs)[:, None])
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                load_box(x_desc, [tile * 128, k], bar, x_ring.index(at.stage * 2))
                if pairs > 64:
                    load_box(x_desc, [tile * 128 + 64, k], bar, x_ring.index(at.stage * 2 + 1))
            at = at.next(STAGES)
    ring.wait_empty(at)
    tell(tasks.index(at.stage * TOLD), -1, WARPS)
    sync()
    mbarrier.expect(ring.full.index(at.stage), 0)
    if GATHER:
        async_copy.mbarrier_arrive(ring.full.index(at.stage), increment_count=False)
