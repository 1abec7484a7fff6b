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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.cache_scales import FP8, CacheScales
from kernels.hopper.compat import sync, view
from kernels.hopper.softmax import LOG2E, clear
from kernels.paged_attention.decode_persistent import (
    FACTS,
    HELD,
    KEYS,
    SLAB,
    SLOTS,
    feed,
    key_weights,
    known,
    launch,
    no_sums,
    readable,
    split_barriers,
    store_split,
    take,
)
from kernels.workspace import Workspace

# Channels of a head.
WIDTH = gl.constexpr(128)
# The largest float16, at which queries end.
HALF_LARGEST = gl.constexpr(65504.0)
# Programs of a multiprocessor.
PROGRAMS = 3


@gluon.jit
def _multiply(p_out, p_partials, p_sums, p_arrived, ring, q_ring, halves, values, weights, ring_bars, q_bars,
              tasks, task_bars, scale, v_scale, H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
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
    seq, i_group, begin, end, length, i_split, num_splits, base = known(tasks, task_bars, asked, 4)
    while seq >= 0:
        best, total, lower, upper = no_sums(mma)
        place = asked % 2
        q_bars.wait_turn(asked, 2)
        q = q_ring.index(place).load(narrow).to(gl.float32)
        q = gl.minimum(gl.maximum(q, -HALF_LARGEST), HALF_LARGEST)
        # All products of the split before have been waited for by all.
        sync()
        halves.store(q.to(gl.float16))
        fence_async_shared()
        sync()
        q_bars.release(place)
        for tile in range(begin, end):
            stage = turn % STAGES
            ring_bars.wait_turn(turn, STAGES)
            k = ring.index(stage * 2).load(operand).to(gl.float16)
            s = gl.zeros([KEYS, HELD], gl.float32, mma)
            s = warpgroup_mma(k, halves.permute((1, 0)), s, use_acc=False, is_async=True)
            v = ring.index(stage * 2 + 1).load(flat).to(gl.float16)
            s = warpgroup_mma_wait(0, deps=[s])
            w, best, total, fade = key_weights(s, tile, row, length, factor, best, total)
            # The sum over keys has met all warps behind their products, which read weights and values.
            weights.permute((1, 0)).store(w.to(gl.float16))
            values.store(v)
            if (tile + 1) * KEYS > length:
                seen = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, flat)) < length
                clear(values, seen, flat)
            fence_async_shared()
            sync()
            ring_bars.release(stage)
            heads = weights.permute((1, 0))
            low = warpgroup_mma(slabs.index(0).permute((1, 0)), heads, lower * fade[None, :], is_async=True)
            high = warpgroup_mma(slabs.index(1).permute((1, 0)), heads, upper * fade[None, :], is_async=True)
            lower, upper = warpgroup_mma_wait(0, deps=(low, high))
            turn += 1
        asked += 1
        store_split(
            p_out, p_partials, p_sums, p_arrived, lower, upper, best, total, v_scale, row, head, held, seq, i_group,
            i_split, num_splits, base, H, G, GROUP,
        )  # fmt: skip
        seq, i_group, begin, end, length, i_split, num_splits, base = known(tasks, task_bars, asked, 4)


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
    ring_bars, q_bars, task_bars, wanted = split_barriers(STAGES)
    # Lengths and tables are written before the first dependent launch of a step, so they are read without waiting.
    gl.warp_specialize(
        [
            (_multiply, (
                p_out, p_partials, p_sums, p_arrived, ring, q_ring, halves, values, weights, ring_bars, q_bars, tasks,
                task_bars, scale, v_scale, H, G, GROUP, STAGES,
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


def suits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the kernel takes these: what is `readable`, cached in 8-bit floats."""
    return k_cache.dtype == FP8 and readable(q, k_cache, v_cache)


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
    launch(
        workspace, decode_persistent_fp8_kernel, PROGRAMS, WIDTH.value, q, k_cache, v_cache, block_table, context_len,
        out, arrived, (scale * scales.k, scales.v), seqs,
    )  # fmt: skip
