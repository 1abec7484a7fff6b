# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Attention of many queries to keys and values made of latents, on Hopper, in Gluon.

As paged attention of prompts does it (`kernels.paged_attention.prompt`, which says how work is divided), for heads
whose keys have channels of their own and rotated ones that all heads share, and whose values are narrower than keys.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.attention import GROUPS, ROWS, attend_keys, end_values, key_barriers, weigh_last
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_box, sync, view
from kernels.hopper.schedule import query_tile, turn_place
from kernels.latent_attention.up import SEQS
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Keys a tile, and tiles that shared memory holds.
KEYS, STAGES = 64, 3


@gluon.jit
def _read(
    q_desc, kv_desc, rotated_desc, p_query_start, p_context, q_ring, turned_ring, k_ring, r_ring, v_ring, q_full,
    q_empty, t_empty, bars, first_seq, seqs, ranks,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr, PADDED: gl.constexpr,
    SEQS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The reading warp. Keys past a sequence's context are zeros, which fill the sequence's last PADDED entries up."""
    PLAIN: gl.constexpr = NOPE // 64
    HALVES: gl.constexpr = VALUE // 64
    q_boxes = view(q_ring, q_desc.dtype, [GROUPS * PLAIN, ROWS, 1, 64], q_desc.layout)
    turned_boxes = view(turned_ring, q_desc.dtype, [2 * GROUPS, ROWS, 1, 64], q_desc.layout)
    k_boxes = view(k_ring, kv_desc.dtype, [STAGES * PLAIN, BLOCK_N, 64], kv_desc.layout)
    v_boxes = view(v_ring, kv_desc.dtype, [STAGES * HALVES, BLOCK_N, 64], kv_desc.layout)
    each = gl.arange(0, SEQS, gl.BlockedLayout([SEQS // 32], [32], [1], [0]))
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turn = program * 0
    asked = turn
    if PDL:
        gdc_wait()
    for number in range((ranks * seqs * HEADS + programs - 1) // programs):
        place = turn_place(number, program, programs)
        seq, head, token, query, _, _, tiles = query_tile(
            place, seqs, first_seq, p_query_start, p_context, HEADS, GROUPS * ROWS, BLOCK_N
        )
        if tiles > 0:
            before = gl.load(p_context + first_seq + each, mask=first_seq + each < seq, other=0)
            start = gl.sum((before + PADDED - 1) // PADDED, axis=0) * PADDED
            mbarrier.wait(q_empty, (asked & 1) ^ 1)
            mbarrier.wait(t_empty.index(asked % 2), ((asked // 2) & 1) ^ 1)
            mbarrier.expect(q_full, GROUPS * ROWS * (NOPE + ROPE) * 2)
            for part in gl.static_range(GROUPS):
                for half in gl.static_range(PLAIN):
                    load_box(q_desc, [token + query + part * ROWS, head, half * 64], q_full,
                             q_boxes.index(part * PLAIN + half))  # fmt: skip
                load_box(q_desc, [token + query + part * ROWS, head, NOPE], q_full,
                         turned_boxes.index(asked % 2 * GROUPS + part))  # fmt: skip
            asked += 1
            for back in range(tiles):
                row = start + (tiles - 1 - back) * BLOCK_N
                column = head * (NOPE + VALUE)
                stage = turn % STAGES
                after = turn + 1
                k_bar = bars.k_full.index(stage)
                v_bar = bars.v_full.index(stage)
                bars.acquire(turn, k_bar, BLOCK_N * (NOPE + ROPE) * 2, STAGES)
                for half in gl.static_range(PLAIN):
                    load_box(kv_desc, [row, column + half * 64], k_bar, k_boxes.index(stage * PLAIN + half))
                load_box(rotated_desc, [row, 0], k_bar, r_ring.index(stage))
                bars.acquire(after, v_bar, BLOCK_N * VALUE * 2, STAGES)
                for half in gl.static_range(HALVES):
                    load_box(kv_desc, [row, column + NOPE + half * 64], v_bar, v_boxes.index(stage * HALVES + half))
                turn += 1


@gluon.jit
def _multiply(
    p_query_start, p_context, p_out, q_ring, turned_ring, k_ring, r_ring, v_ring, q_full, q_empty, t_empty, bars,
    scale, first_seq, seqs, ranks,
    PART: gl.constexpr, HEADS: gl.constexpr, VALUE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Group PART of the multiplying warps: its queries of each tile, over all keys that they see."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // VALUE, VALUE // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = p_out.dtype.element_ty
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turn = program * 0
    asked = turn
    if PDL:
        gdc_wait()
    # The next tile is looked up before the keys of this one.
    _, head, token, query, count, length, tiles = query_tile(
        turn_place(0, program, programs), seqs, first_seq, p_query_start, p_context, HEADS, GROUPS * ROWS, BLOCK_N
    )
    for number in range((ranks * seqs * HEADS + programs - 1) // programs):
        _, next_head, next_token, next_query, next_count, next_length, next_tiles = query_tile(
            turn_place(number + 1, program, programs), seqs, first_seq, p_query_start, p_context, HEADS,
            GROUPS * ROWS, BLOCK_N,
        )  # fmt: skip
        acc = gl.zeros([ROWS, VALUE], gl.float32, o_layout)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
        if tiles > 0:
            past = gl.maximum(length - count, 0)
            position = past + query + PART * ROWS + row
            # Tiles of keys that every query of the tile sees whole.
            plain = gl.minimum((past + query + 1) // BLOCK_N, tiles - 1)
            mbarrier.wait(q_full, asked & 1)
            turned = turned_ring.index(asked % 2 * GROUPS + PART)
            q = q_ring.index(PART).load(q_layout)
            mbarrier.arrive(q_empty, count=1)
            first = (tiles - 1) * BLOCK_N
            qs, rings = (turned, q), (r_ring, k_ring)
            weight, m, l = weigh_last(
                qs, rings, bars, turn, m, l, first, position, scale, 0.0, s_layout, BLOCK_N, STAGES, False
            )
            turn += 1
            acc, l, weight, turn = attend_keys(
                turn, acc, m, l, weight, qs, rings, v_ring, bars, tiles, plain, position, scale, 0.0, s_layout,
                BLOCK_N, STAGES, False,
            )  # fmt: skip
            mbarrier.arrive(t_empty.index(asked % 2), count=1)
            asked += 1
            acc = end_values(acc, weight, v_ring, bars, turn, STAGES)
        if query >= 0:
            norm = gl.convert_layout(1.0 / gl.where(l > 0.0, l, 1.0), gl.SliceLayout(1, o_layout))
            y = gl.convert_layout((acc * norm[:, None]).to(dtype), flat)
            mine = query + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, flat))
            channel = gl.arange(0, VALUE, gl.SliceLayout(0, flat))
            place = ((token + mine).to(gl.int64) * HEADS + head) * VALUE
            gl.store(p_out + place[:, None] + channel[None, :], y, mask=(mine < count)[:, None])
        head, token, query = next_head, next_token, next_query
        count, length, tiles = next_count, next_length, next_tiles


@gluon.jit(
    do_not_specialize=["first_seq", "seqs", "ranks"],
    do_not_specialize_on_alignment=["p_query_start", "p_context"],
)
def attend_kernel(
    q_desc, kv_desc, rotated_desc, p_query_start, p_context, p_out, scale, first_seq, seqs, ranks,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr, PADDED: gl.constexpr,
    SEQS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program's tiles of queries; `ranks` tiles at most a sequence. A sequence's keys begin where those of the
    sequences before, each filled up to a multiple of PADDED, end."""
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = q_desc.dtype
    q_plain: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, NOPE], dtype)
    q_turned: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROPE], dtype)
    k_plain: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, NOPE], dtype)
    v_plain: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, VALUE], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, NOPE], q_plain)
    turned_ring = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, ROPE], q_turned)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, NOPE], k_plain)
    r_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], rotated_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, VALUE], v_plain)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    t_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for place in gl.static_range(2):
        mbarrier.init(t_empty.index(place), count=GROUPS)
    bars = key_barriers(STAGES)
    fence_async_shared()
    sync()
    gl.warp_specialize(
        [
            (_multiply, (
                p_query_start, p_context, p_out, q_ring, turned_ring, k_ring, r_ring, v_ring, q_full, q_empty, t_empty,
                bars, scale, first_seq, seqs, ranks,
                0, HEADS, VALUE, BLOCK_N, STAGES, PDL,
            )),
            (_multiply, (
                p_query_start, p_context, p_out, q_ring, turned_ring, k_ring, r_ring, v_ring, q_full, q_empty, t_empty,
                bars, scale, first_seq, seqs, ranks,
                1, HEADS, VALUE, BLOCK_N, STAGES, PDL,
            )),
            (_read, (
                q_desc, kv_desc, rotated_desc, p_query_start, p_context, q_ring, turned_ring, k_ring, r_ring, v_ring,
                q_full, q_empty, t_empty, bars, first_seq, seqs, ranks,
                HEADS, NOPE, ROPE, VALUE, PADDED, SEQS, BLOCK_N, STAGES, PDL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def suits(q: torch.Tensor, nope: int, value: int) -> bool:
    """Whether the kernel takes these: 16-bit queries that the copy engine can read, whole boxes of channels."""
    rope = q.shape[-1] - nope
    read = q.stride(2) == 1 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 and q.data_ptr() % 16 == 0
    sizes = nope in (64, 128) and rope == 64 and value in (64, 128)
    return group_products(q.device) and q.dtype != torch.float32 and read and sizes


def attend_prompts(
    workspace: Workspace,
    q: torch.Tensor,
    kv: torch.Tensor,
    rotated: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    first_seq: int,
    max_query: int,
    padded: int,
) -> None:
    """Attention of the sequences from `first_seq` on, of up to `max_query` queries, written into `out`.

    kv [rows, H · (nope + Dv)] and rotated [rows, rope] hold the sequences' keys and values one sequence after another,
    each filled up with zeros to a multiple of `padded` rows, whole tiles of keys. Takes what `suits` says.
    """
    _, heads, width = q.shape
    rope, value = rotated.shape[1], out.shape[-1]
    seqs = len(context_len) - first_seq
    ranks = cdiv(max_query, GROUPS.value * ROWS.value)
    workspace.launch(attend_kernel, (min(multiprocessors(q.device), ranks * seqs * heads),))(
        boxes(q, ROWS.value, 1, 64), boxes(kv, KEYS, 64), boxes(rotated, KEYS, 64), query_start, context_len, out,
        scale, first_seq, seqs, ranks, HEADS=heads, NOPE=width - rope, ROPE=rope, VALUE=value, PADDED=padded,
        SEQS=max(SEQS, next_power_of_2(seqs)), BLOCK_N=KEYS, STAGES=STAGES, PDL=workspace.pdl, num_warps=4,
        launch_pdl=workspace.pdl,
    )  # fmt: skip
