# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Paged attention of many queries on Hopper, in Gluon: one warp reads, two groups of warps multiply.

FlashAttention-3's division of work (Shah et al. 2024, arXiv:2407.08608). The reading warp has the bulk copy engine
(TMA) bring queries, and keys and values block by block from where the cache keeps them, into rings of shared memory:
nothing is gathered before. A group of four warps multiplies 64 rows (queries × heads of a kv group) by a tile of keys
while the softmax of the tile before is worked out, and its own softmax runs under the other group's products. Each
program takes tiles of queries in turn, the longest first and back and forth, so that all end together.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_scales import UNSCALED, CacheScales
from kernels.hardware import group_products, multiprocessors
from kernels.hopper.attention import GROUPS, ROWS, attend_keys, end_values, key_barriers, weigh_last
from kernels.hopper.boxes import boxes, rows_of, whole_rows
from kernels.hopper.compat import load_box, sync, view
from kernels.hopper.schedule import query_tile, turn_place
from kernels.hopper.softmax import LOG2E
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Keys a tile, and tiles that shared memory holds of keys and of values. On an H200 tiles of 128 keys cost fewer
# instructions a key, and more time.
KEYS, STAGES = 64, 4


@gluon.jit
def _read_tile(
    desc, ring, bar, p_blocks, stage, first, length, block_rows, head_row,
    HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPIED: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Asks for the tile of keys, or of values, from `first` on, piece by piece as blocks hold it."""
    for copy in gl.static_range(COPIES):
        key = first + copy * COPIED
        block = gl.load(p_blocks + key // BLOCK_SIZE, mask=key < length, other=0)
        row = block * block_rows + head_row + key % BLOCK_SIZE
        for half in gl.static_range(HALVES):
            load_box(desc, [row, half * 64], bar, ring.index((stage * HALVES + half) * COPIES + copy))


@gluon.jit
def _read(
    q_desc, k_desc, v_desc, p_table, p_query_start, p_context, q_ring, k_ring, v_ring, q_full, q_empty,
    bars, table_stride, k_block_rows, k_head_rows, v_block_rows, v_head_rows, first_seq, seqs, ranks,
    G: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    COPIED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The reading warp. Keys past a sequence's context come from block 0, or are what stands in the sequence's last
    block."""
    QUERIES: gl.constexpr = ROWS // WIDTH
    HALVES: gl.constexpr = D // 64
    COPIES: gl.constexpr = BLOCK_N // COPIED
    q_boxes = view(q_ring, q_desc.dtype, [GROUPS * HALVES, QUERIES, WIDTH, 64], q_desc.layout)
    k_boxes = view(k_ring, k_desc.dtype, [STAGES * HALVES * COPIES, COPIED, 64], k_desc.layout)
    v_boxes = view(v_ring, v_desc.dtype, [STAGES * HALVES * COPIES, COPIED, 64], v_desc.layout)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turn = program * 0
    asked = turn
    if PDL:
        gdc_wait()
    for number in range((ranks * seqs * G + programs - 1) // programs):
        seq, group, token, query, _, length, tiles = query_tile(
            turn_place(number, program, programs), seqs, first_seq, p_query_start, p_context, G, GROUPS * QUERIES,
            BLOCK_N,
        )  # fmt: skip
        if tiles > 0:
            mbarrier.wait(q_empty, (asked & 1) ^ 1)
            mbarrier.expect(q_full, GROUPS * ROWS * D * 2)
            for part in gl.static_range(GROUPS):
                for half in gl.static_range(HALVES):
                    spot = [token + query + part * QUERIES, group * GROUP, half * 64]
                    load_box(q_desc, spot, q_full, q_boxes.index(part * HALVES + half))
            asked += 1
            p_blocks = p_table + seq.to(gl.int64) * table_stride
            for back in range(tiles):
                first = (tiles - 1 - back) * BLOCK_N
                stage = turn % STAGES
                after = turn + 1
                k_bar = bars.k_full.index(stage)
                v_bar = bars.v_full.index(stage)
                bars.acquire(turn, k_bar, BLOCK_N * D * 2, STAGES)
                _read_tile(
                    k_desc, k_boxes, k_bar, p_blocks, stage, first, length, k_block_rows, group * k_head_rows,
                    HALVES, BLOCK_SIZE, COPIED, COPIES,
                )  # fmt: skip
                bars.acquire(after, v_bar, BLOCK_N * D * 2, STAGES)
                _read_tile(
                    v_desc, v_boxes, v_bar, p_blocks, stage, first, length, v_block_rows, group * v_head_rows,
                    HALVES, BLOCK_SIZE, COPIED, COPIES,
                )  # fmt: skip
                turn += 1


@gluon.jit
def _multiply(
    p_query_start, p_context, p_sinks, p_out, q_ring, k_ring, v_ring, q_full, q_empty, bars,
    scale, softcap, v_scale, first_seq, seqs, ranks,
    PART: gl.constexpr, H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Group PART of the multiplying warps: its rows of each tile of queries, over all keys that they see."""
    QUERIES: gl.constexpr = ROWS // WIDTH
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = p_out.dtype.element_ty
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turn = program * 0
    asked = turn
    if PDL:
        gdc_wait()
    # The next tile is looked up before the keys of this one.
    _, group, token, query, count, length, tiles = query_tile(
        turn_place(0, program, programs), seqs, first_seq, p_query_start, p_context, G, GROUPS * QUERIES, BLOCK_N
    )
    for number in range((ranks * seqs * G + programs - 1) // programs):
        _, next_group, next_token, next_query, next_count, next_length, next_tiles = query_tile(
            turn_place(number + 1, program, programs), seqs, first_seq, p_query_start, p_context, G, GROUPS * QUERIES,
            BLOCK_N,
        )  # fmt: skip
        acc = gl.zeros([ROWS, D], gl.float32, o_layout)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        if HAS_SINKS:
            own = group * GROUP + row % WIDTH
            m = gl.load(p_sinks + own, mask=row % WIDTH < GROUP, other=0.0).to(gl.float32) * LOG2E
            l = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, s_layout))
        else:
            m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
        if tiles > 0:
            past = gl.maximum(length - count, 0)
            position = past + query + PART * QUERIES + row // WIDTH
            # Tiles of keys that every query of the tile sees whole.
            plain = gl.minimum((past + query + 1) // BLOCK_N, tiles - 1)
            mbarrier.wait(q_full, asked & 1)
            asked += 1
            q = q_ring.index(PART).load(q_layout)
            mbarrier.arrive(q_empty, count=1)
            first = (tiles - 1) * BLOCK_N
            weight, m, l = weigh_last(
                (q,), (k_ring,), bars, turn, m, l, first, position, scale, softcap, s_layout, BLOCK_N, STAGES,
                HAS_SOFTCAP,
            )  # fmt: skip
            if first + BLOCK_N > length:
                # What stands past the context may be anything, and a weight of zero does not clear all of it.
                stage = turn % STAGES
                mbarrier.wait(bars.v_full.index(stage), (turn // STAGES) & 1)
                v = v_ring.index(stage).load(flat)
                key = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, flat))
                v_ring.index(stage).store(gl.where((key < length)[:, None], v, 0.0).to(dtype))
                fence_async_shared()
                sync()
            turn += 1
            acc, l, weight, turn = attend_keys(
                turn, acc, m, l, weight, (q,), (k_ring,), v_ring, bars, tiles, plain, position, scale, softcap,
                s_layout, BLOCK_N, STAGES, HAS_SOFTCAP,
            )  # fmt: skip
            acc = end_values(acc, weight, v_ring, bars, turn, STAGES)
        if query >= 0:
            norm = gl.convert_layout(v_scale / gl.where(l > 0.0, l, 1.0), gl.SliceLayout(1, o_layout))
            y = gl.convert_layout((acc * norm[:, None]).to(dtype), flat)
            seq_row = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
            channel = gl.arange(0, D, gl.SliceLayout(0, flat))
            mine = query + PART * QUERIES + seq_row // WIDTH
            head = seq_row % WIDTH
            place = ((token + mine).to(gl.int64) * H + group * GROUP + head) * D
            held = (mine < count) & (head < GROUP)
            gl.store(p_out + place[:, None] + channel[None, :], y, mask=held[:, None])
        group, token, query = next_group, next_token, next_query
        count, length, tiles = next_count, next_length, next_tiles


@gluon.jit(
    do_not_specialize=["first_seq", "seqs", "ranks"],
    do_not_specialize_on_alignment=["p_query_start", "p_context"],
)
def attend_kernel(
    q_desc, k_desc, v_desc, p_table, p_query_start, p_context, p_sinks, p_out,
    table_stride, k_block_rows, k_head_rows, v_block_rows, v_head_rows, scale, softcap, v_scale, first_seq, seqs,
    ranks, H: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, COPIED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program's tiles of queries; `ranks` tiles at most a sequence. WIDTH: GROUP up to a power of two.

    One program fills a multiprocessor: 240 registers for each thread that multiplies.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = q_desc.dtype
    q_plain: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    k_plain: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D], q_plain)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_plain)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_plain)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    bars = key_barriers(STAGES)
    fence_async_shared()
    sync()
    gl.warp_specialize(
        [
            (_multiply, (
                p_query_start, p_context, p_sinks, p_out, q_ring, k_ring, v_ring, q_full, q_empty, bars,
                scale, softcap, v_scale, first_seq, seqs, ranks,
                0, H, G, GROUP, WIDTH, D, BLOCK_N, STAGES, HAS_SOFTCAP, HAS_SINKS, PDL,
            )),
            (_multiply, (
                p_query_start, p_context, p_sinks, p_out, q_ring, k_ring, v_ring, q_full, q_empty, bars,
                scale, softcap, v_scale, first_seq, seqs, ranks,
                1, H, G, GROUP, WIDTH, D, BLOCK_N, STAGES, HAS_SOFTCAP, HAS_SINKS, PDL,
            )),
            (_read, (
                q_desc, k_desc, v_desc, p_table, p_query_start, p_context, q_ring, k_ring, v_ring, q_full, q_empty,
                bars, table_stride, k_block_rows, k_head_rows, v_block_rows, v_head_rows,
                first_seq, seqs, ranks, G, GROUP, WIDTH, D, BLOCK_SIZE, COPIED, BLOCK_N, STAGES, PDL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def suits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the kernel takes these: 16-bit, cached as well, key and value of one width, whole rows in the caches."""
    d = q.shape[-1]
    if k_cache.dtype != q.dtype:
        return False
    if not group_products(q.device) or q.dtype == torch.float32 or d not in (64, 128) or v_cache.shape[-1] != d:
        return False
    return whole_rows(k_cache) and whole_rows(v_cache) and q.shape[1] // k_cache.shape[1] <= ROWS.value


def attend_prompts(
    workspace: Workspace,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    first_seq: int,
    num_seqs: int,
    max_query: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scales: CacheScales = UNSCALED,
) -> None:
    """`paged_attention` of `num_seqs` sequences from `first_seq` on, of up to `max_query` queries, written into `out`.

    No window, and what `suits` says of the rest. Caches hold keys and values over `scales`, in q's dtype.
    """
    _, h, d = q.shape
    g, block_size = k_cache.shape[1:3]
    group = h // g
    width = next_power_of_2(group)
    queries = ROWS.value // width
    copied = min(block_size, KEYS)
    pdl = workspace.pdl
    ranks = cdiv(max_query, GROUPS.value * queries)
    workspace.launch(attend_kernel, (min(multiprocessors(q.device), ranks * num_seqs * g),))(
        boxes(q, queries, width, 64), boxes(rows_of(k_cache), copied, 64), boxes(rows_of(v_cache), copied, 64),
        block_table, query_start, context_len,
        sinks if sinks is not None else q, out, block_table.stride(0),
        k_cache.stride(0) // d, k_cache.stride(1) // d, v_cache.stride(0) // d, v_cache.stride(1) // d,
        scale * scales.k, softcap if softcap is not None else 0.0, scales.v, first_seq, num_seqs, ranks,
        H=h, G=g, GROUP=group, WIDTH=width, D=d, BLOCK_SIZE=block_size, COPIED=copied,
        BLOCK_N=KEYS, STAGES=STAGES, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
