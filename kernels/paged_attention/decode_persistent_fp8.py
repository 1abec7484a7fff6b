# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Sequences of one query over caches of 8-bit floats on Hopper, in Gluon: as `decode_persistent`, at half the bytes.

Tiles of 64 keys and 64 values come as 8-bit floats, a block at a time, and are multiplied as float16, which holds them
exactly and takes one instruction for two of them. Keys go from shared memory to registers, from where the matrix unit
takes them; values are written back as float16, since it needs them the other way round. Queries become float16 once a
split, and weights do.
"""

from __future__ import annotations

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

from kernels.cache_scales import FP8, CacheScales
from kernels.hardware import group_products, multiprocessors
from kernels.hopper import boxes, load_box, rows_of, sync, view, whole_rows
from kernels.paged_attention.attend import LOG2E
from kernels.paged_attention.decode_persistent import (
    BLOCK,
    FACTS,
    HELD,
    KEYS,
    LEAST,
    MOST,
    SLAB,
    SLOTS,
    barriers,
    known,
    moments,
    rows_of_tile,
    store_split,
    take,
)
from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace

# Channels of a head.
WIDTH = gl.constexpr(128)
# The largest float16, at which queries end.
HALF_LARGEST = gl.constexpr(65504.0)
# Programs of a multiprocessor, and tiles in the ring of each.
PROGRAMS, STAGES = 3, 3
# Registers of a thread before the warp that asks gives its own away.
REGISTERS = 80


@gluon.jit
def _feed(q_desc, desc, p_table, ring, q_ring, full, empty, q_full, q_empty, tasks, told, wanted, table_stride,
          block_rows, head_rows, H: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, OF_KEYS: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    """A warp: asks for the keys of each split, and its queries, or for the values. What this step wrote is a sequence's
    last entry."""
    COPIES: gl.constexpr = KEYS // BLOCK
    FIRST: gl.constexpr = 0 if OF_KEYS else 1
    pieces = view(ring, desc.dtype, [STAGES * 2 * COPIES, BLOCK, WIDTH], desc.layout)
    q_boxes = view(q_ring, q_desc.dtype, [4, HELD, SLAB], q_desc.layout)
    turn = gl.program_id(0) * 0
    asked = turn
    seq, head, begin, end, length, _i_split, _num_splits, _first = known(tasks, told, asked, 1)
    while seq >= 0:
        late, soon = moments(begin, end, asked, STAGES)
        blocks = p_table + seq.to(gl.int64) * table_stride
        for tile in range(begin, end):
            rows = rows_of_tile(blocks, tile, length, head * head_rows, block_rows, COPIES, PDL)
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, KEYS * WIDTH)
            for copy in gl.static_range(COPIES):
                load_box(desc, [rows[copy], 0], bar, pieces.index((stage * 2 + FIRST) * COPIES + copy))
            turn += 1
            if OF_KEYS:
                if tile == late:
                    if PDL:
                        gdc_wait()
                    spot = asked % 2
                    mbarrier.wait(q_empty.index(spot), ((asked // 2) & 1) ^ 1)
                    mbarrier.expect(q_full.index(spot), HELD * WIDTH * 2)
                    for slab in gl.static_range(2):
                        row = seq * H + head * GROUP
                        load_box(q_desc, [row, slab * SLAB], q_full.index(spot), q_boxes.index(spot * 2 + slab))
                if tile == soon:
                    mbarrier.arrive(wanted, count=1)
        asked += 1
        seq, head, begin, end, length, _i_split, _num_splits, _first = known(tasks, told, asked, 1)


@gluon.jit
def _multiply(p_out, p_partials, p_sums, p_arrived, ring, q_ring, halves, values, weights, full, empty, q_full, q_empty,
              tasks, told, scale, v_scale, H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """Four warps: scores [keys, heads] and outputs [channels, heads], channels by slabs. halves: the queries in
    float16; values: a tile of them."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HELD, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    slab_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, SLAB], gl.float16)
    slabs = view(values, gl.float16, [2, KEYS, SLAB], slab_layout)
    row = gl.arange(0, KEYS, gl.SliceLayout(1, mma))
    head = gl.arange(0, HELD, gl.SliceLayout(0, mma))
    held = (row >= 0)[:, None] & (head < GROUP)[None, :]
    factor = scale * LOG2E
    turn = gl.program_id(0) * 0
    asked = turn
    seq, i_group, begin, end, length, i_split, num_splits, base = known(tasks, told, asked, 4)
    while seq >= 0:
        best = gl.full([HELD], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
        total = gl.zeros([KEYS, HELD], gl.float32, mma)
        lower = gl.zeros([SLAB, HELD], gl.float32, mma)
        upper = gl.zeros([SLAB, HELD], gl.float32, mma)
        place = asked % 2
        mbarrier.wait(q_full.index(place), (asked // 2) & 1)
        q = q_ring.index(place).load(narrow).to(gl.float32)
        q = gl.minimum(gl.maximum(q, -HALF_LARGEST), HALF_LARGEST)
        # All products of the split before have been waited for by all.
        sync()
        halves.store(q.to(gl.float16))
        fence_async_shared()
        sync()
        mbarrier.arrive(q_empty.index(place), count=1)
        for tile in range(begin, end):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            k = ring.index(stage * 2).load(operand).to(gl.float16)
            s = gl.zeros([KEYS, HELD], gl.float32, mma)
            s = warpgroup_mma(k, halves.permute((1, 0)), s, use_acc=False, is_async=True)
            v = ring.index(stage * 2 + 1).load(flat).to(gl.float16)
            s = warpgroup_mma_wait(0, deps=[s])
            key = tile * KEYS + row
            s = gl.where((key < length)[:, None], s * factor, float("-inf"))
            top = gl.maximum(best, gl.max(s, axis=0))
            shift = gl.where(top == float("-inf"), 0.0, top)
            w = gl.exp2(s - shift[None, :])
            fade = gl.exp2(best - shift)
            best = top
            total = total * fade[None, :] + w
            # The sum over keys has met all warps behind their products, which read weights and values.
            weights.permute((1, 0)).store(w.to(gl.float16))
            values.store(v)
            if (tile + 1) * KEYS > length:
                # What stands past the context may be anything, and a weight of zero does not clear all of it.
                seen = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, flat)) < length
                values.store(gl.where(seen[:, None], values.load(flat), 0.0).to(gl.float16))
            fence_async_shared()
            sync()
            mbarrier.arrive(empty.index(stage), count=1)
            heads = weights.permute((1, 0))
            low = warpgroup_mma(slabs.index(0).permute((1, 0)), heads, lower * fade[None, :], is_async=True)
            high = warpgroup_mma(slabs.index(1).permute((1, 0)), heads, upper * fade[None, :], is_async=True)
            lower, upper = warpgroup_mma_wait(0, deps=(low, high))
            turn += 1
        asked += 1
        whole = gl.sum(total, axis=0)
        rest = v_scale / gl.where(whole > 0.0, whole, 1.0)
        store_split(
            p_out, p_partials, p_sums, p_arrived, lower, upper, best, whole, rest, row, head, held, seq, i_group,
            i_split, num_splits, base, H, G, GROUP,
        )  # fmt: skip
        seq, i_group, begin, end, length, i_split, num_splits, base = known(tasks, told, asked, 4)


@gluon.jit(do_not_specialize=["seqs", "least", "most"], do_not_specialize_on_alignment=["p_context"])
def decode_persistent_fp8_kernel(
    q_desc, k_desc, v_desc, p_table, p_context, p_out, p_partials, p_sums, p_arrived, p_turns, scale, v_scale,
    table_stride, k_block_rows, k_head_rows, v_block_rows, v_head_rows, seqs, least, most,
    H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, SEQS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A program's splits; the last split of a sequence's kv head to arrive adds them all up."""
    if PDL:
        gdc_launch_dependents()
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, WIDTH], k_desc.dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HELD, WIDTH], gl.float16)
    halved: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, WIDTH], gl.float16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HELD, KEYS], gl.float16)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES * 2, KEYS, WIDTH], tile)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2, HELD, WIDTH], wide)
    halves = gl.allocate_shared_memory(gl.float16, [HELD, WIDTH], wide)
    values = gl.allocate_shared_memory(gl.float16, [KEYS, WIDTH], halved)
    weights = gl.allocate_shared_memory(gl.float16, [HELD, KEYS], narrow)
    tasks = gl.allocate_shared_memory(gl.int32, [SLOTS * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty, q_full, q_empty, told, wanted = barriers(STAGES)
    # Lengths and tables are written before the first dependent launch of a step, so they are read without waiting.
    gl.warp_specialize(
        [
            (_multiply, (
                p_out, p_partials, p_sums, p_arrived, ring, q_ring, halves, values, weights, full, empty, q_full,
                q_empty, tasks, told, scale, v_scale, H, G, GROUP, STAGES,
            )),
            (_feed, (
                q_desc, k_desc, p_table, ring, q_ring, full, empty, q_full, q_empty, tasks, told, wanted, table_stride,
                k_block_rows, k_head_rows, H, GROUP, STAGES, True, PDL,
            )),
            (_feed, (
                q_desc, v_desc, p_table, ring, q_ring, full, empty, q_full, q_empty, tasks, told, wanted, table_stride,
                v_block_rows, v_head_rows, H, GROUP, STAGES, False, PDL,
            )),
            (take, (p_context, p_turns, tasks, told, wanted, seqs, least, most, G, SEQS, PDL)),
        ],
        [1, 1, 1],
        [56, 56, 48],
    )  # fmt: skip


def suits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the kernel takes these: 16-bit queries of heads that one instruction holds, caches of 8-bit floats with
    whole rows of 128 channels, blocks of the engine's default size."""
    d = q.shape[-1]
    whole = whole_rows(k_cache) and whole_rows(v_cache) and k_cache.shape[2] == BLOCK.value
    narrow = q.shape[1] // k_cache.shape[1] <= HELD.value and d == v_cache.shape[-1] == WIDTH.value
    fp8 = q.element_size() == 2 and k_cache.dtype == FP8
    return group_products(q.device) and fp8 and narrow and whole and q.is_contiguous()


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
    scales: CacheScales,
) -> None:
    """`paged_attention` of the first `seqs` sequences, which have one query each, into `out`'s first rows.

    arrived: int32 zeros, which are zero again afterwards: splits of each sequence's kv heads, and in the last place
    shares that were taken.
    """
    _, h, d = q.shape
    g = k_cache.shape[1]
    programs = PROGRAMS * multiprocessors(q.device)
    num_splits = seqs * g + programs * MOST
    partial = torch.empty(num_splits, h // g, d, dtype=torch.float32, device=q.device)
    sums = torch.empty(num_splits, h // g, dtype=torch.float32, device=q.device)
    k_rows, v_rows = (cache.stride()[:2] for cache in (k_cache, v_cache))
    workspace.launch(decode_persistent_fp8_kernel, (programs,))(
        boxes(q.flatten(0, 1), HELD.value, SLAB.value),
        boxes(rows_of(k_cache), BLOCK.value, WIDTH.value), boxes(rows_of(v_cache), BLOCK.value, WIDTH.value),
        block_table, context_len, out, partial, sums, arrived, arrived[-1:], scale * scales.k, scales.v,
        block_table.stride(0), k_rows[0] // d, k_rows[1] // d, v_rows[0] // d, v_rows[1] // d, seqs, LEAST, MOST,
        H=h, G=g, GROUP=h // g, SEQS=max(32, next_power_of_2(seqs)), STAGES=STAGES, PDL=workspace.pdl,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=workspace.pdl,
    )  # fmt: skip
