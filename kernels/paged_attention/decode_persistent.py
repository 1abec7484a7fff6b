# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Sequences of one query on Hopper, in Gluon: keys and values stream through shared memory and are the matrix unit's
long side.

The keys of a sequence's kv head are cut into splits of a few tiles, and a program takes the next split from a counter
of all programs, so that sequences may differ. The bulk copy engine (TMA) brings tiles of 64 keys and values from where
blocks hold them, those of a program's first split before the kernel before has finished, for earlier steps wrote them;
copies run ahead across the boundaries of splits, as far as the ring in shared memory allows.
"""

from __future__ import annotations

from typing import Any

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

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes, rows_of, whole_rows
from kernels.hopper.compat import load_box, sync, view
from kernels.hopper.ring import barriers, ring_of
from kernels.hopper.schedule import plus, tell, told
from kernels.hopper.softmax import LOG2E, clear, column_weights
from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace

# Keys a tile, tokens of a block, channels of a slab: a tile is two slabs of keys and two of values, each of whole
# swizzled rows.
KEYS = gl.constexpr(64)
BLOCK = gl.constexpr(16)
SLAB = gl.constexpr(64)
# Rows of a box of queries, which are columns of the matrix unit.
HELD = gl.constexpr(8)
# Programs of a multiprocessor, and tiles in the ring of each.
PROGRAMS, STAGES = 2, 3
# Tiles worth a split, and splits that there are for each program, besides one of each sequence's kv heads.
LEAST, MOST = 20, 12
# Partials that are on their way at once when they are added up.
AT_ONCE = gl.constexpr(4)
# Splits of a program that are known at once, more than the ring has tiles, and what is to know of each.
SLOTS = gl.constexpr(8)
FACTS = gl.constexpr(8)
# Registers of a thread before the warp that asks gives its own away.
REGISTERS = 80


@gluon.jit
def known(tasks, task_bars, turn, WARPS: gl.constexpr):
    """Of a program's split of that number: its sequence (−1 behind the last one), kv head, first tile and the one
    behind its last, the sequence's tokens, which split of how many of the sequence's head it is, and the place of the
    first."""
    slot = turn % SLOTS
    mbarrier.wait(task_bars.index(slot), (turn // SLOTS) & 1)
    at = slot * FACTS
    seq, head = told(tasks.index(at), WARPS), told(tasks.index(at + 1), WARPS)
    begin, end = told(tasks.index(at + 2), WARPS), told(tasks.index(at + 3), WARPS)
    length, num_splits = told(tasks.index(at + 4), WARPS), told(tasks.index(at + 5), WARPS)
    first, i_split = told(tasks.index(at + 6), WARPS), told(tasks.index(at + 7), WARPS)
    return seq, head, begin, end, length, i_split, num_splits, first


@gluon.jit
def _ratio(a, b):
    """a // b of positive numbers, a below two million, in fewer instructions than an integer division."""
    return ((a.to(gl.float32) + 0.5) / b.to(gl.float32)).to(gl.int32)


@gluon.jit
def take(p_context, p_turns, tasks, task_bars, wanted, seqs, least, most, G: gl.constexpr, SEQS: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    """A warp: takes the next split when it is wanted, and tells what there is to know of it."""
    every: gl.constexpr = gl.BlockedLayout([SEQS // 32], [32], [1], [0])
    each = gl.arange(0, SEQS, every)
    length = gl.load(p_context + each, mask=each < seqs, other=0)
    tiles = gl.where(each < seqs, gl.maximum((length + KEYS - 1) // KEYS, 1), 0)
    programs = gl.num_programs(0)
    worth = gl.maximum(least, (gl.sum(tiles, axis=0) * G + programs * most - 1) // (programs * most))
    num_splits = _ratio(tiles + worth - 1, worth)
    upto = gl.associative_scan(num_splits, 0, plus)
    count = gl.sum(num_splits, axis=0) * G
    split = gl.program_id(0)
    turn = split * 0
    while split < count:
        number = split // G
        head = split % G
        passed = upto <= number
        seq = gl.sum(passed.to(gl.int32), axis=0)
        before = gl.sum(gl.where(passed, num_splits, 0), axis=0)
        mine = each == seq
        of = gl.sum(gl.where(mine, num_splits, 0), axis=0)
        own = gl.sum(gl.where(mine, length, 0), axis=0)
        whole = gl.sum(gl.where(mine, tiles, 0), axis=0)
        i_split = number - before
        at = turn % SLOTS * FACTS
        tell(tasks.index(at), seq, 1)
        tell(tasks.index(at + 1), head, 1)
        tell(tasks.index(at + 2), _ratio(i_split * whole, of), 1)
        end = gl.where(i_split == of - 1, whole, _ratio((i_split + 1) * whole, of))
        tell(tasks.index(at + 3), end, 1)
        tell(tasks.index(at + 4), own, 1)
        tell(tasks.index(at + 5), of, 1)
        tell(tasks.index(at + 6), before * G + head, 1)
        tell(tasks.index(at + 7), i_split, 1)
        sync()
        mbarrier.arrive(task_bars.index(turn % SLOTS), count=1)
        mbarrier.wait(wanted, turn & 1)
        turn += 1
        if PDL:
            gdc_wait()
        taken = gl.atomic_add(p_turns, 1, sem="relaxed")
        if taken == count - 1:
            # Nobody takes another one.
            gl.store(p_turns, 0)
        split = programs + taken
    tell(tasks.index(turn % SLOTS * FACTS), -1, 1)
    sync()
    mbarrier.arrive(task_bars.index(turn % SLOTS), count=1)


@gluon.jit
def moments(begin, end, asked, STAGES: gl.constexpr):
    """Behind which tiles of a split its queries are asked for, the first behind as many as the ring holds, and the next
    task."""
    late = begin
    if asked == 0:
        late = gl.minimum(begin + STAGES, end) - 1
    return late, gl.maximum(end - 2, begin)


@gluon.jit
def rows_of_tile(blocks, tile, length, head_row, block_rows, COPIES: gl.constexpr, PDL: gl.constexpr):
    """Where a tile's blocks begin in the cache. Waits before a sequence's last tile for what this step has written."""
    rows = ()
    for copy in gl.static_range(COPIES):
        place = tile * COPIES + copy
        block = gl.load(blocks + place, mask=place * BLOCK < length, other=0)
        rows = rows + (block * block_rows + head_row,)  # noqa: RUF005
    if PDL and (tile + 1) * KEYS >= length:
        gdc_wait()
    return rows


@gluon.jit
def feed(q_desc, desc, p_table, ring, q_ring, ring_bars, q_bars, tasks, task_bars, wanted, table_stride, block_rows,
         head_rows, H: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, OF_KEYS: gl.constexpr,
         PDL: gl.constexpr):  # fmt: skip
    """A warp: asks for the keys of each split, and its queries, or for the values. What this step wrote is a sequence's
    last entry. A stage holds keys and then values, each in as many slabs as a box's channels make of a head's."""
    COPIES: gl.constexpr = KEYS // BLOCK
    WIDTH: gl.constexpr = desc.block_shape[1]
    SLABS: gl.constexpr = 2 * SLAB // WIDTH
    FIRST: gl.constexpr = 0 if OF_KEYS else SLABS
    BYTES: gl.constexpr = KEYS * 2 * SLAB * desc.dtype.primitive_bitwidth // 8
    pieces = view(ring, desc.dtype, [STAGES * 2 * SLABS * COPIES, BLOCK, WIDTH], desc.layout)
    q_boxes = view(q_ring, q_desc.dtype, [4, HELD, SLAB], q_desc.layout)
    turn = gl.program_id(0) * 0
    asked = turn
    seq, head, begin, end, length, _i_split, _num_splits, _first = known(tasks, task_bars, asked, 1)
    while seq >= 0:
        late, soon = moments(begin, end, asked, STAGES)
        blocks = p_table + seq.to(gl.int64) * table_stride
        for tile in range(begin, end):
            rows = rows_of_tile(blocks, tile, length, head * head_rows, block_rows, COPIES, PDL)
            stage = turn % STAGES
            bar = ring_bars.acquire_turn(turn, BYTES, STAGES)
            for slab in gl.static_range(SLABS):
                for copy in gl.static_range(COPIES):
                    place = (stage * 2 * SLABS + FIRST + slab) * COPIES + copy
                    load_box(desc, [rows[copy], slab * WIDTH], bar, pieces.index(place))
            turn += 1
            if OF_KEYS:
                if tile == late:
                    if PDL:
                        gdc_wait()
                    spot = asked % 2
                    q_bar = q_bars.acquire_turn(asked, 2 * HELD * SLAB * 2, 2)
                    for slab in gl.static_range(2):
                        row = seq * H + head * GROUP
                        load_box(q_desc, [row, slab * SLAB], q_bar, q_boxes.index(spot * 2 + slab))
                if tile == soon:
                    mbarrier.arrive(wanted, count=1)
        asked += 1
        seq, head, begin, end, length, _i_split, _num_splits, _first = known(tasks, task_bars, asked, 1)


@gluon.jit
def combine(p_partials, p_sums, p_rows, first, num_splits, G: gl.constexpr, GROUP: gl.constexpr):
    """Adds up the partials of a sequence's kv head, every G-th from the `first` on, and stores its heads' outputs."""
    near: gl.constexpr = gl.BlockedLayout([2, 4], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, HELD, gl.SliceLayout(1, near))
    channel = gl.arange(0, 2 * SLAB, gl.SliceLayout(0, near))
    best = gl.full([HELD], float("-inf"), gl.float32, gl.SliceLayout(1, near))
    total = gl.zeros([HELD], gl.float32, gl.SliceLayout(1, near))
    merged = gl.zeros([HELD, 2 * SLAB], gl.float32, near)
    for at in range(0, num_splits, AT_ONCE):
        sums = ()
        some = ()
        for i in gl.static_range(AT_ONCE):
            place = (first + (at + i) * G).to(gl.int64) * GROUP + head
            there = head < gl.where(at + i < num_splits, GROUP, 0)
            sums = sums + (gl.load(p_sums + place, mask=there, other=float("-inf")),)  # noqa: RUF005
            spot = p_partials + place[:, None] * (2 * SLAB) + channel[None, :]
            some = some + (gl.load(spot, mask=there[:, None], other=0.0),)  # noqa: RUF005
        top = best
        for i in gl.static_range(AT_ONCE):
            top = gl.maximum(top, sums[i])
        shift = gl.where(top == float("-inf"), 0.0, top)
        fade = gl.exp2(best - shift)
        total = total * fade
        merged = merged * fade[:, None]
        for i in gl.static_range(AT_ONCE):
            weight = gl.exp2(sums[i] - shift)
            total += weight
            merged += some[i] * weight[:, None]
        best = top
    merged = merged / gl.where(total > 0.0, total, 1.0)[:, None]
    spot = p_rows + head[:, None] * (2 * SLAB) + channel[None, :]
    gl.store(spot, merged.to(p_rows.dtype.element_ty), mask=(head < GROUP)[:, None])


@gluon.jit
def no_sums(mma: gl.constexpr):
    """What a split begins with: the best scores [heads], sums of weights [keys, heads], and outputs [channels, heads]
    by slabs."""
    best = gl.full([HELD], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
    total = gl.zeros([KEYS, HELD], gl.float32, mma)
    lower = gl.zeros([SLAB, HELD], gl.float32, mma)
    upper = gl.zeros([SLAB, HELD], gl.float32, mma)
    return best, total, lower, upper


@gluon.jit
def key_weights(s, tile, row, length, factor, best, total):
    """As `column_weights`, of a tile's products [keys, heads] with the queries; a sequence has `length` keys."""
    key = tile * KEYS + row
    s = gl.where((key < length)[:, None], s * factor, float("-inf"))
    return column_weights(s, best, total, False)


@gluon.jit
def store_split(p_out, p_partials, p_sums, p_arrived, lower, upper, best, total, v_scale, row, head, held, seq, i_group,
                i_split, num_splits, base, H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Stores what a split gave: outputs [channels, heads], of which `lower` and `upper` are slabs with weights that sum
    up to `total`, where it is the only one of its sequence's kv head, else partials. The last of several adds them all
    up."""
    whole = gl.sum(total, axis=0)
    rest = v_scale / gl.where(whole > 0.0, whole, 1.0)
    p_rows = p_out + (seq * H + i_group * GROUP).to(gl.int64) * (2 * SLAB)
    if num_splits == 1:
        spot = p_rows + head[None, :] * (2 * SLAB) + row[:, None]
        gl.store(spot, (lower * rest[None, :]).to(p_out.dtype.element_ty), mask=held)
        gl.store(spot + SLAB, (upper * rest[None, :]).to(p_out.dtype.element_ty), mask=held)
    else:
        mine = (base + i_split * G).to(gl.int64) * GROUP + head
        gl.store(p_sums + mine, best + gl.log2(whole), mask=head < GROUP)
        p_mine = p_partials + mine[None, :] * (2 * SLAB) + row[:, None]
        gl.store(p_mine, lower * rest[None, :], mask=held)
        gl.store(p_mine + SLAB, upper * rest[None, :], mask=held)
        sync()
        arrived = gl.atomic_add(p_arrived + seq * G + i_group, 1, sem="acq_rel", scope="gpu")
        if arrived == num_splits - 1:
            gl.store(p_arrived + seq * G + i_group, 0)
            combine(p_partials, p_sums, p_rows, base, num_splits, G, GROUP)


@gluon.jit
def split_barriers(STAGES: gl.constexpr):
    """Those of the ring's stages, of two places for queries, and of tasks that were told and are wanted."""
    ring_bars = ring_of(STAGES, 2, 1)
    q_bars = ring_of(2, 1, 1)
    task_bars = barriers(SLOTS, 1)
    wanted = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(wanted, count=1)
    fence_async_shared()
    sync()
    return ring_bars, q_bars, task_bars, wanted


@gluon.jit
def _multiply(p_out, p_partials, p_sums, p_arrived, ring, q_ring, weights, ring_bars, q_bars, tasks, task_bars, scale,
              H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Four warps: scores [keys, heads] and outputs [channels, heads], channels by slabs."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HELD, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, KEYS, gl.SliceLayout(1, mma))
    head = gl.arange(0, HELD, gl.SliceLayout(0, mma))
    held = (row >= 0)[:, None] & (head < GROUP)[None, :]
    factor = scale * LOG2E
    turn = gl.program_id(0) * 0
    asked = turn
    seq, i_group, begin, end, length, i_split, num_splits, base = known(tasks, task_bars, asked, 4)
    while seq >= 0:
        best, total, lower, upper = no_sums(mma)
        place = asked % 2
        q_bars.wait_turn(asked, 2)
        for tile in range(begin, end):
            stage = turn % STAGES
            ring_bars.wait_turn(turn, STAGES)
            s = gl.zeros([KEYS, HELD], gl.float32, mma)
            for slab in gl.static_range(2):
                q = q_ring.index(place * 2 + slab).permute((1, 0))
                s = warpgroup_mma(ring.index(stage * 4 + slab), q, s, use_acc=slab > 0, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            w, best, total, fade = key_weights(s, tile, row, length, factor, best, total)
            weights.permute((1, 0)).store(w.to(weights.dtype))
            if (tile + 1) * KEYS > length:
                seen = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, flat)) < length
                for slab in gl.static_range(2):
                    clear(ring.index(stage * 4 + 2 + slab), seen, flat)
            fence_async_shared()
            sync()
            narrow = weights.permute((1, 0))
            v = ring.index(stage * 4 + 2).permute((1, 0))
            low = warpgroup_mma(v, narrow, lower * fade[None, :], is_async=True)
            v = ring.index(stage * 4 + 3).permute((1, 0))
            high = warpgroup_mma(v, narrow, upper * fade[None, :], is_async=True)
            lower, upper = warpgroup_mma_wait(0, deps=(low, high))
            ring_bars.release(stage)
            turn += 1
        q_bars.release(place)
        asked += 1
        store_split(
            p_out, p_partials, p_sums, p_arrived, lower, upper, best, total, 1.0, row, head, held, seq, i_group,
            i_split, num_splits, base, H, G, GROUP,
        )  # fmt: skip
        seq, i_group, begin, end, length, i_split, num_splits, base = known(tasks, task_bars, asked, 4)


@gluon.jit(do_not_specialize=["seqs", "least", "most"], do_not_specialize_on_alignment=["p_context"])
def decode_persistent_kernel(
    q_desc, k_desc, v_desc, p_table, p_context, p_out, p_partials, p_sums, p_arrived, p_turns, scale, table_stride,
    k_block_rows, k_head_rows, v_block_rows, v_head_rows, seqs, least, most,
    H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, SEQS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A program's splits; the last split of a sequence's kv head to arrive adds them all up."""
    if PDL:
        gdc_launch_dependents()
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, SLAB], k_desc.dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HELD, KEYS], k_desc.dtype)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES * 4, KEYS, SLAB], tile)
    q_ring = gl.allocate_shared_memory(k_desc.dtype, [4, HELD, SLAB], q_desc.layout)
    weights = gl.allocate_shared_memory(k_desc.dtype, [HELD, KEYS], narrow)
    tasks = gl.allocate_shared_memory(gl.int32, [SLOTS * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_bars, q_bars, task_bars, wanted = split_barriers(STAGES)
    # Lengths and tables are written before the first dependent launch of a step, so they are read without waiting.
    gl.warp_specialize(
        [
            (_multiply, (
                p_out, p_partials, p_sums, p_arrived, ring, q_ring, weights, ring_bars, q_bars, tasks, task_bars,
                scale, H, G, GROUP, STAGES,
            )),
            (feed, (
                q_desc, k_desc, p_table, ring, q_ring, ring_bars, q_bars, tasks, task_bars, wanted, table_stride,
                k_block_rows, k_head_rows, H, GROUP, STAGES, True, PDL,
            )),
            (feed, (
                q_desc, v_desc, p_table, ring, q_ring, ring_bars, q_bars, tasks, task_bars, wanted, table_stride,
                v_block_rows, v_head_rows, H, GROUP, STAGES, False, PDL,
            )),
            (take, (p_context, p_turns, tasks, task_bars, wanted, seqs, least, most, G, SEQS, PDL)),
        ],
        [1, 1, 1],
        [56, 56, 48],
    )  # fmt: skip


def readable(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether `launch` takes these: 16-bit queries of heads that one instruction holds, whole rows of 128 channels,
    blocks of the engine's default size."""
    d = q.shape[-1]
    whole = whole_rows(k_cache) and whole_rows(v_cache) and k_cache.shape[2] == BLOCK.value
    narrow = q.shape[1] // k_cache.shape[1] <= HELD.value and d == v_cache.shape[-1] == 2 * SLAB.value
    return group_products(q.device) and q.element_size() == 2 and narrow and whole and q.is_contiguous()


def suits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the kernel takes these: what is `readable`, cached as it comes."""
    return k_cache.dtype == q.dtype and readable(q, k_cache, v_cache)


def launch(
    workspace: Workspace,
    kernel: Any,
    programs: int,
    channels: int,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    arrived: torch.Tensor,
    scales: tuple[float, ...],
    seqs: int,
) -> None:
    """Launches a kernel of so many programs a multiprocessor that reads its caches in boxes of so many channels."""
    _, h, d = q.shape
    g = k_cache.shape[1]
    programs *= multiprocessors(q.device)
    num_splits = seqs * g + programs * MOST
    partial = torch.empty(num_splits, h // g, d, dtype=torch.float32, device=q.device)
    sums = torch.empty(num_splits, h // g, dtype=torch.float32, device=q.device)
    k_rows, v_rows = (cache.stride()[:2] for cache in (k_cache, v_cache))
    workspace.launch(kernel, (programs,))(
        boxes(q.flatten(0, 1), HELD.value, SLAB.value),
        boxes(rows_of(k_cache), BLOCK.value, channels), boxes(rows_of(v_cache), BLOCK.value, channels),
        block_table, context_len, out, partial, sums, arrived, arrived[-1:], *scales, block_table.stride(0),
        k_rows[0] // d, k_rows[1] // d, v_rows[0] // d, v_rows[1] // d, seqs, LEAST, MOST,
        H=h, G=g, GROUP=h // g, SEQS=max(32, next_power_of_2(seqs)), STAGES=STAGES, PDL=workspace.pdl,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=workspace.pdl,
    )  # fmt: skip


def attend_decode(
    workspace: Workspace,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    arrived: torch.Tensor,
    scale: float,
    seqs: int,
) -> None:
    """`paged_attention` of the first `seqs` sequences, which have one query each, into `out`'s first rows.

    arrived: int32 zeros, which are zero again afterwards: splits of each sequence's kv heads, and in the last place
    splits that were taken.
    """
    launch(
        workspace, decode_persistent_kernel, PROGRAMS, SLAB.value, q, k_cache, v_cache, block_table, context_len, out,
        arrived, (scale,), seqs,
    )  # fmt: skip
