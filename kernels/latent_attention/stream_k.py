# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Sequences of one query on Hopper, in Gluon: entries stream through shared memory and are the matrix unit's long side.

The tiles of all sequences stand in one row, and every program takes an equal range of it (stream-K, Osama et al. 2023,
arXiv:2301.03598), one program a multiprocessor. The bulk copy engine (TMA) brings a tile's entries from where blocks
hold them; those of earlier steps are asked for before the kernel before has finished. 64 entries by 16 heads are one
instruction's scores, and 64 channels by 16 heads one's outputs, so no row of the matrix unit is filled up for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes, cache_rows, rows_of, whole_rows
from kernels.hopper.compat import load_box, sync, view
from kernels.hopper.ring import ring_of
from kernels.hopper.schedule import plus
from kernels.hopper.softmax import LOG2E, clear, column_weights
from kernels.latent_attention.split_kv import add_partial
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Entries a tile, heads of a program, channels of a slab: a tile is slabs of whole swizzled rows, side by side.
ENTRIES = gl.constexpr(64)
HEADS_HELD = gl.constexpr(16)
SLAB = gl.constexpr(64)
STAGES = 2
MIN_SEQS = 128


@gluon.jit
def _stream_k_range(p_context, seqs, SEQS: gl.constexpr):
    """Of this program: its first tile and the one behind its last, the sequences that hold these, the first sequence's
    first tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    seq = gl.arange(0, SEQS, layout)
    tiles = (gl.load(p_context + seq, mask=seq < seqs, other=0) + ENTRIES - 1) // ENTRIES
    upto = gl.associative_scan(tiles, 0, plus)
    total = gl.sum(tiles, axis=0)
    program = gl.program_id(0)
    # With fewer tiles than programs the last ones have none, and nobody between others.
    programs = gl.maximum(gl.minimum(gl.num_programs(0), total), 1)
    first = gl.minimum(program, programs) * total // programs
    stop = gl.minimum(program + 1, programs) * total // programs
    begun = (upto <= first) & (seq < seqs)
    first_seq = gl.sum(begun.to(gl.int32), axis=0)
    before = gl.sum(gl.where(begun, tiles, 0), axis=0)
    last_seq = gl.sum(((upto < stop) & (seq < seqs)).to(gl.int32), axis=0)
    return first, stop, first_seq, last_seq, before


@gluon.jit
def _ask_queries(q_desc, p_context, q_ring, q_bars, first, stop, first_seq, last_seq, before,
                 HEADS: gl.constexpr, SLABS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """A warp: the queries of each sequence of the range."""
    start = before
    turn = first * 0
    if PDL:
        gdc_wait()
    for seq in range(first_seq, last_seq + 1):
        tiles = (gl.load(p_context + seq) + ENTRIES - 1) // ENTRIES
        if gl.minimum(start + tiles, stop) > gl.maximum(start, first):
            place = turn % 2
            bar = q_bars.acquire_turn(turn, SLABS * HEADS_HELD * SLAB * 2, 2)
            for slab in gl.static_range(SLABS):
                load_box(q_desc, [seq * HEADS, slab * SLAB], bar, q_ring.index(place * SLABS + slab))
            turn += 1
        start += tiles


@gluon.jit
def _ask_entries(c_desc, p_table, p_context, ring, ring_bars, table_stride, block_rows, first, stop, first_seq,
                 last_seq, before, SLABS: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPIED: gl.constexpr,
                 STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """A warp: the entries of each tile of the range. What this step wrote is a sequence's last entry."""
    COPIES: gl.constexpr = ENTRIES // COPIED
    pieces = view(ring, c_desc.dtype, [STAGES * SLABS * COPIES, COPIED, SLAB], c_desc.layout)
    start = before
    turn = first * 0
    for seq in range(first_seq, last_seq + 1):
        length = gl.load(p_context + seq)
        tiles = (length + ENTRIES - 1) // ENTRIES
        blocks = p_table + seq.to(gl.int64) * table_stride
        begin = gl.maximum(first - start, 0)
        end = gl.minimum(tiles, stop - start)
        # Without this condition Triton 3.6 takes `start` for a constant of the loop.
        if end > begin:
            for tile in range(begin, end):
                rows = cache_rows(blocks, tile * ENTRIES, length, block_rows, BLOCK_SIZE, COPIED, COPIES)
                if PDL and tile == tiles - 1:
                    gdc_wait()
                stage = turn % STAGES
                bar = ring_bars.acquire_turn(turn, ENTRIES * SLABS * SLAB * 2, STAGES)
                for slab in gl.static_range(SLABS):
                    for copy in gl.static_range(COPIES):
                        place = (stage * SLABS + slab) * COPIES + copy
                        load_box(c_desc, [rows[copy], slab * SLAB], bar, pieces.index(place))
                turn += 1
        start += tiles


@gluon.jit
def _multiply(p_context, p_partials, p_sums, ring, q_ring, weights, ring_bars, q_bars, scale, first, stop,
              first_seq, last_seq, before, HEADS: gl.constexpr, LATENT: gl.constexpr, SLABS: gl.constexpr,
              STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Four warps: scores [entries, heads] and outputs [channels, heads], channels by slabs."""
    VALUES: gl.constexpr = LATENT // SLAB
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ENTRIES, gl.SliceLayout(1, mma))
    head = gl.arange(0, HEADS_HELD, gl.SliceLayout(0, mma))
    factor = scale * LOG2E
    start = before
    turn = first * 0
    asked = first * 0
    if PDL:
        gdc_wait()
    for seq in range(first_seq, last_seq + 1):
        length = gl.load(p_context + seq)
        tiles = (length + ENTRIES - 1) // ENTRIES
        begin = gl.maximum(first - start, 0)
        end = gl.minimum(tiles, stop - start)
        if end > begin:
            best = gl.full([HEADS_HELD], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
            total = gl.zeros([ENTRIES, HEADS_HELD], gl.float32, mma)
            acc = ()
            for _ in gl.static_range(VALUES):
                acc = acc + (gl.zeros([SLAB, HEADS_HELD], gl.float32, mma),)  # noqa: RUF005
            place = asked % 2
            q_bars.wait_turn(asked, 2)
            for tile in range(begin, end):
                stage = turn % STAGES
                ring_bars.wait_turn(turn, STAGES)
                s = gl.zeros([ENTRIES, HEADS_HELD], gl.float32, mma)
                for slab in gl.static_range(SLABS):
                    q = q_ring.index(place * SLABS + slab).permute((1, 0))
                    s = warpgroup_mma(ring.index(stage * SLABS + slab), q, s, use_acc=slab > 0, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                key = tile * ENTRIES + row
                s = gl.where((key < length)[:, None], s * factor, float("-inf"))
                w, best, total, fade = column_weights(s, best, total, True)
                weights.permute((1, 0)).store(w.to(weights.dtype))
                if (tile + 1) * ENTRIES > length:
                    held = tile * ENTRIES + gl.arange(0, ENTRIES, gl.SliceLayout(1, flat)) < length
                    for slab in gl.static_range(VALUES):
                        clear(ring.index(stage * SLABS + slab), held, flat)
                fence_async_shared()
                sync()
                faded = ()
                for slab in gl.static_range(VALUES):
                    c = ring.index(stage * SLABS + slab).permute((1, 0))
                    token = warpgroup_mma(c, weights.permute((1, 0)), acc[slab] * fade[None, :], is_async=True)
                    faded = faded + (token,)  # noqa: RUF005
                acc = warpgroup_mma_wait(0, deps=faded)
                ring_bars.release(stage)
                turn += 1
            q_bars.release(place)
            asked += 1
            whole = gl.sum(total, axis=0)
            partial = ((gl.program_id(0) + seq) * HEADS + head).to(gl.int64)
            gl.store(p_sums + partial, best + gl.log2(whole), mask=head < HEADS)
            norm = 1.0 / whole
            held = (row >= 0)[:, None] & (head < HEADS)[None, :]
            for slab in gl.static_range(VALUES):
                spot = partial[None, :] * LATENT + slab * SLAB + row[:, None]
                gl.store(p_partials + spot, acc[slab] * norm[None, :], mask=held)
        start += tiles


@gluon.jit(do_not_specialize=["seqs"], do_not_specialize_on_alignment=["p_context"])
def stream_k_kernel(
    q_desc, c_desc, p_table, p_context, p_partials, p_sums, scale, table_stride, block_rows, seqs,
    HEADS: gl.constexpr, LATENT: gl.constexpr, SLABS: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPIED: gl.constexpr,
    SEQS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program's range. Its partial of a sequence goes to the place `program + seq`, which no other partial has."""
    if PDL:
        gdc_launch_dependents()
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ENTRIES, SLAB], c_desc.dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS_HELD, ENTRIES], c_desc.dtype)
    ring = gl.allocate_shared_memory(c_desc.dtype, [STAGES * SLABS, ENTRIES, SLAB], tile)
    q_ring = gl.allocate_shared_memory(c_desc.dtype, [2 * SLABS, HEADS_HELD, SLAB], q_desc.layout)
    weights = gl.allocate_shared_memory(c_desc.dtype, [HEADS_HELD, ENTRIES], narrow)
    ring_bars = ring_of(STAGES, 1, 1)
    q_bars = ring_of(2, 1, 1)
    fence_async_shared()
    sync()
    # Lengths and tables are written before the first dependent launch of a step, so they are read without waiting.
    first, stop, first_seq, last_seq, before = _stream_k_range(p_context, seqs, SEQS)
    gl.warp_specialize(
        [
            (_multiply, (
                p_context, p_partials, p_sums, ring, q_ring, weights, ring_bars, q_bars, scale, first, stop,
                first_seq, last_seq, before, HEADS, LATENT, SLABS, STAGES, PDL,
            )),
            (_ask_entries, (
                c_desc, p_table, p_context, ring, ring_bars, table_stride, block_rows, first, stop, first_seq,
                last_seq, before, SLABS, BLOCK_SIZE, COPIED, STAGES, PDL,
            )),
            (_ask_queries, (
                q_desc, p_context, q_ring, q_bars, first, stop, first_seq, last_seq, before, HEADS, SLABS,
                PDL,
            )),
        ],
        [1, 1],
        [48, 40],
    )  # fmt: skip


@triton.jit(do_not_specialize=["seqs", "programs"], do_not_specialize_on_alignment=["context_len"])
def _combine_stream_k(
    partials,
    sums,
    v_up,
    context_len,
    out,
    up_stride,
    seqs,
    programs,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[sequence, head, v] = v_up[head, v] · (the partials of the sequence's head, weighted by their softmax sums),
    AT_ONCE of each sequence's partials at once."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    seq = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    l = tl.arange(0, LATENT)
    w = tl.load(v_up + head * up_stride + v[:, None] * LATENT + l[None, :], mask=(v < VALUE)[:, None], other=0.0)
    every = tl.arange(0, BLOCK_B)
    tiles = tl.cdiv(tl.load(context_len + every, mask=every < seqs, other=0), TILE)
    total = tl.maximum(tl.sum(tiles, 0), 1)
    programs = tl.minimum(programs, total)
    own = tl.cdiv(tl.load(context_len + seq, mask=seq < seqs, other=0), TILE)
    before = tl.sum(tl.where(every[None, :] < seq[:, None], tiles[None, :], 0), 1)
    first = ((before + 1) * programs - 1) // total
    count = tl.where(own > 0, ((before + own) * programs - 1) // total - first + 1, 0)
    if PDL:
        gdc_wait()
    best = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    whole = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, LATENT), tl.float32)
    for some in range(0, tl.max(count, 0), AT_ONCE):
        for one in tl.static_range(AT_ONCE):
            there = some + one < count
            place = (seq + first + some + one).to(tl.int64) * HEADS + head
            logsum = tl.load(sums + place, mask=there, other=float("-inf"))
            partial = tl.load(partials + place[:, None] * LATENT + l[None, :], mask=there[:, None], other=0.0)
            best, whole, acc = add_partial(best, whole, acc, logsum, partial)
    o = (acc / tl.where(whole == 0.0, 1.0, whole)[:, None]).to(out.dtype.element_ty)
    y = tl.dot(o, tl.trans(w), input_precision="ieee")
    place = (seq.to(tl.int64) * HEADS + head)[:, None] * VALUE + v[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=(seq < seqs)[:, None] & (v < VALUE)[None, :])


@dataclass(frozen=True, slots=True)
class CombineTile:
    """How partials are combined: sequences and values of a program, partials of a sequence at once, warps."""

    seqs: int = 16
    values: int = 64
    at_once: int = 3
    warps: int = 8


def suits(absorbed: torch.Tensor, kv_up: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether the kernels take these: 16-bit, heads that one instruction holds, whole slabs and whole rows."""
    heads, width = absorbed.shape[1:]
    latent = kv_up.shape[-1]
    whole = whole_rows(cache[:, None]) and cache.shape[1] % 8 == 0
    slabs = width % SLAB.value == 0 and latent % SLAB.value == 0 and latent & (latent - 1) == 0
    held = cache.dtype == absorbed.dtype != torch.float32 and heads <= HEADS_HELD.value
    return group_products(cache.device) and held and whole and slabs


def attend_stream_k(
    workspace: Workspace,
    absorbed: torch.Tensor,
    kv_up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    seqs: int,
    combine: CombineTile,
) -> None:
    """`latent_attention` of the first `seqs` sequences, which have one query each, written into `out`'s first rows."""
    _, heads, width = absorbed.shape
    latent, value = kv_up.shape[-1], out.shape[-1]
    block_size, block_rows, rows = cache.shape[1], cache.stride(0) // width, rows_of(cache[:, None])
    programs = multiprocessors(absorbed.device)
    held = max(MIN_SEQS, next_power_of_2(seqs))
    copied = min(block_size, ENTRIES.value)
    partials = torch.empty(programs + seqs, heads, latent, dtype=torch.float32, device=absorbed.device)
    sums = torch.empty(programs + seqs, heads, dtype=torch.float32, device=absorbed.device)
    workspace.launch(stream_k_kernel, (programs,))(
        boxes(absorbed.flatten(0, 1), HEADS_HELD.value, SLAB.value), boxes(rows, copied, SLAB.value), block_table,
        context_len, partials, sums, scale, block_table.stride(0), block_rows, seqs, HEADS=heads, LATENT=latent,
        SLABS=width // SLAB.value, BLOCK_SIZE=block_size, COPIED=copied, SEQS=held, STAGES=STAGES, PDL=workspace.pdl,
        num_warps=4, launch_pdl=workspace.pdl,
    )  # fmt: skip
    values = min(combine.values, max(16, next_power_of_2(value)))
    workspace.launch(_combine_stream_k, (heads, cdiv(value, values), cdiv(seqs, combine.seqs)))(
        partials, sums, kv_up[:, kv_up.shape[1] - value :], context_len, out, kv_up.stride(0), seqs, programs,
        HEADS=heads, LATENT=latent, VALUE=value, TILE=ENTRIES.value, BLOCK_T=combine.seqs, BLOCK_V=values, BLOCK_B=held,
        AT_ONCE=combine.at_once, PDL=workspace.pdl, num_warps=combine.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
