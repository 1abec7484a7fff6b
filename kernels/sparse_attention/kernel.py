# mypy: disable-error-code="no-untyped-def"
"""Attention over a window and over compressed entries: a program takes a query's heads, as rows of the tensor cores,
and a split of what the query reads; then the splits are joined and turned back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import AttentionBatch
from kernels.hardware import group_products, large_shared_memory, multiprocessors
from kernels.rotate_tail.kernel import angles, turn_pairs
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Heads of a program, keys of a tile, warps and the depth of the pipeline.
BLOCK_H, BLOCK_N, WARPS, STAGES = 64, 32, 8, 2
# Those of so few queries that the device holds all programs at once.
FEW_H, FEW_N, FEW_WARPS = 16, 64, 8
MAX_SPLITS = 16
# Splits that are read at once where they are combined.
COMBINED = 8


class Cut(NamedTuple):
    """How queries are cut into programs: heads and keys of a tile, and splits of what a query reads. one: no split has
    more than one tile."""

    heads: int
    keys: int
    splits: int
    one: bool
    warps: int


def whole(heads: int, device: torch.device) -> Cut:
    """Queries that are not split."""
    most = BLOCK_H if large_shared_memory(device) else FEW_H
    return Cut(min(most, max(16, next_power_of_2(heads))), BLOCK_N, 1, False, WARPS)


def divided(rows: int, heads: int, window: int, entries: int, device: torch.device) -> Cut:
    """Of `rows` single queries, none of which reads more than these."""
    programs = multiprocessors(device)
    keys = FEW_N if large_shared_memory(device) else BLOCK_N
    tiles = cdiv(window, keys) + cdiv(entries, keys)
    splits = min(tiles, MAX_SPLITS)
    if rows * cdiv(heads, FEW_H) * splits <= programs:
        return Cut(FEW_H, keys, splits, tiles == splits, FEW_WARPS)
    made = whole(heads, device)
    room = max(1, programs // (rows * cdiv(heads, made.heads)))
    # groups of warps multiply from shared memory: others hold a tile there twice
    if tiles <= min(room, MAX_SPLITS) and group_products(device):
        return made._replace(keys=keys, splits=tiles, one=True)
    # powers of two: each number is compiled
    most = next_power_of_2(cdiv(window, BLOCK_N) + cdiv(entries, BLOCK_N))
    return made._replace(splits=min(1 << (room.bit_length() - 1), MAX_SPLITS, most))


@triton.jit
def _tiles_of(p, WINDOW: tl.constexpr, RATIO: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a query at p: the tiles that its window fills, the entries that it may read, those of them that it looks at,
    and all its tiles."""
    in_window = tl.cdiv(tl.minimum(p + 1, WINDOW), BLOCK_N)
    ready = 0
    end = 0
    if RATIO:
        ready = (p + 1) // RATIO
        end = tl.minimum(ready, CHOSEN) if CHOSEN else ready
    return in_window, ready, end, in_window + tl.cdiv(end, BLOCK_N)


@triton.jit
def _look_up(
    tile,
    last,
    tiles_in_window,
    start,
    p,
    chosen,
    end,
    ready,
    table,
    entry_table,
    n,
    BLOCK_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What a tile of BLOCK_N reads, tokens of the window or entries: their blocks, places in them and mask; of a tile
    from `last` on nothing, without a load."""
    if RATIO:
        windowed = tile < tiles_in_window
        i = tl.where(windowed, start + tile * BLOCK_N, (tile - tiles_in_window) * BLOCK_N) + n
        live = i < tl.where(tile < last, tl.where(windowed, p + 1, end), 0)
        if CHOSEN:
            listed = i < tl.where(tile < last, tl.where(windowed, 0, end), 0)
            i = tl.load(chosen + i, mask=listed, other=0) + tl.where(windowed, i, 0)
        # as unsigned numbers, which missing ones, −1, are the highest of; they divide in one instruction
        u = i.to(tl.uint32)
        if CHOSEN:
            live = live & (u < tl.where(windowed, p + 1, ready).to(tl.uint32))
        block = tl.where(windowed, u // BLOCK_SIZE, u // PER_BLOCK)
        block = tl.load(tl.where(windowed, table, entry_table) + block, mask=live, other=0)
        return block, tl.where(windowed, u % BLOCK_SIZE, u % PER_BLOCK).to(tl.int32), live
    else:
        j = start + tile * BLOCK_N + n
        live = j <= tl.where(tile < last, p, -1)
        u = j.to(tl.uint32)
        return tl.load(table + u // BLOCK_SIZE, mask=live, other=0), (u % BLOCK_SIZE).to(tl.int32), live


@triton.jit
def _rows(
    tile,
    tiles_in_window,
    block,
    place,
    cache,
    block_stride,
    row_stride,
    entries,
    entry_block_stride,
    entry_stride,
    RATIO: tl.constexpr,
):
    """The addresses of what a tile reads. Numbers are chosen between, not vectors of addresses, of which the compiler
    would no longer know that they are aligned."""
    if RATIO:
        windowed = tile < tiles_in_window
        cache = tl.where(windowed, cache, entries)
        block_stride = tl.where(windowed, block_stride, entry_block_stride)
        row_stride = tl.where(windowed, row_stride, entry_stride)
    return cache + block.to(tl.int64) * block_stride + place * row_stride


@triton.jit
def _weights(x, c, live, best, scale, PRECISION: tl.constexpr):
    """The best score of each head with this tile, what is taken off scores, and e^{s − that}."""
    s = tl.dot(x, tl.trans(c), input_precision=PRECISION) * scale
    s = tl.where(live[None], s, float("-inf"))
    top = tl.maximum(best, tl.max(s, 1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, shift, tl.exp(s - shift[:, None])


@triton.jit(
    do_not_specialize=["first_seq", "first_token", "tokens"],
    do_not_specialize_on_alignment=["query_start", "context_len", "block_table", "entry_table", "chosen"],
)
def _attend(
    q,
    cache,
    block_table,
    query_start,
    context_len,
    entries,
    entry_table,
    chosen,
    partials,
    sums,
    scale,
    first_seq,
    first_token,
    tokens,
    table_stride,
    block_stride,
    row_stride,
    entry_table_stride,
    entry_block_stride,
    entry_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials[split, token] holds Σ e^{s − best} c of each head and sums[split, token] its best and Σ e^{s − best};
    with one split partials holds the mean itself, without a sink. Tokens count from first_token."""
    if PDL:
        gdc_launch_dependents()
    seq = (first_seq + tl.program_id(0)).to(tl.int64)
    lo = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - lo
    length = tl.load(context_len + seq)
    which = tl.program_id(1)
    if which >= count:
        return
    split = tl.program_id(2) % SPLITS
    token = (lo + which).to(tl.int64)
    p = length - count + which
    h = tl.program_id(2) // SPLITS * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = (h < HEADS)[:, None] & (d < DIM)[None]
    start = tl.maximum(0, p - WINDOW + 1)
    tiles_in_window, ready, end, tiles = _tiles_of(p, WINDOW, RATIO, CHOSEN, BLOCK_N)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    first = split * each
    last = tl.minimum(first + each, tiles)
    if first >= last and split > 0:
        return
    table = block_table + seq * table_stride
    e_table = entry_table + seq * entry_table_stride
    picked = chosen + token * CHOSEN
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if not CHOSEN:
        # tables are older than the launch before this one
        block, place, live = _look_up(
            first, last, tiles_in_window, start, p, picked, end, ready, table, e_table, n,
            BLOCK_SIZE, RATIO, PER_BLOCK, CHOSEN, BLOCK_N,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    x = tl.load(q + (token * HEADS + h)[:, None] * DIM + d[None], mask=inside, other=0.0)
    if CHOSEN:
        block, place, live = _look_up(
            first, last, tiles_in_window, start, p, picked, end, ready, table, e_table, n,
            BLOCK_SIZE, RATIO, PER_BLOCK, CHOSEN, BLOCK_N,
        )  # fmt: skip
    if ONE:
        row = _rows(
            first, tiles_in_window, block, place, cache, block_stride, row_stride, entries, entry_block_stride,
            entry_stride, RATIO,
        )  # fmt: skip
        c = tl.load(row[:, None] + d[None], mask=live[:, None] & (d < DIM)[None], other=0.0)
        best, shift, w = _weights(x, c, live, best, scale, PRECISION)
        acc = tl.dot(w.to(c.dtype), c, input_precision=PRECISION)
        total = tl.sum(w, 1)
    else:
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        # without `tl.range`, which would copy what is looked up to shared memory as well
        for tile in range(first, last):
            row = _rows(
                tile, tiles_in_window, block, place, cache, block_stride, row_stride, entries, entry_block_stride,
                entry_stride, RATIO,
            )  # fmt: skip
            c = tl.load(row[:, None] + d[None], mask=live[:, None] & (d < DIM)[None], other=0.0)
            read = live
            # the next tile is looked up while this one is on its way
            block, place, live = _look_up(
                tile + 1, last, tiles_in_window, start, p, picked, end, ready, table, e_table, n,
                BLOCK_SIZE, RATIO, PER_BLOCK, CHOSEN, BLOCK_N,
            )  # fmt: skip
            top, shift, w = _weights(x, c, read, best, scale, PRECISION)
            fade = tl.exp(best - shift)
            acc = tl.dot(w.to(c.dtype), c, acc * fade[:, None], input_precision=PRECISION)
            total = total * fade + tl.sum(w, 1)
            best = top
    cell = ((split * tokens + token - first_token) * HEADS + h).to(tl.int64)
    tl.store(sums + cell * 2, best, mask=h < HEADS)
    tl.store(sums + cell * 2 + 1, total, mask=h < HEADS)
    if SPLITS == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(partials + cell[:, None] * DIM + d[None], acc.to(partials.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["positions"])
def _finish(
    partials,
    sums,
    sinks,
    positions,
    cos_sin,
    out,
    first_token,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Means of one split, without a sink: joined with it and turned back."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = h < HEADS
    d = tl.arange(0, BLOCK)
    cos, sin = angles(cos_sin, tl.load(positions + first_token + t), DIM, ROPE, BLOCK)
    sink = tl.load(sinks + h, mask=m_h, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    cell = t * HEADS + h
    best = tl.load(sums + cell * 2, mask=m_h, other=float("-inf"))
    total = tl.load(sums + cell * 2 + 1, mask=m_h, other=0.0)
    top = tl.maximum(best, sink)
    own = tl.exp(best - top) * total
    inside = m_h[:, None] & (d < DIM)[None]
    o = tl.load(partials + cell[:, None] * DIM + d[None], mask=inside, other=0.0).to(tl.float32)
    o *= (own / (own + tl.exp(sink - top)))[:, None]
    # by minus the angle
    o = turn_pairs(o, cos, -sin, BLOCK_H, BLOCK)
    place = (first_token + t) * (HEADS * DIM) + h[:, None] * DIM + d[None]
    tl.store(out + place, o.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_token", "tokens"], do_not_specialize_on_alignment=["positions", "context_len"])
def _combine(
    partials,
    sums,
    sinks,
    positions,
    context_len,
    cos_sin,
    out,
    first_token,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    CHOSEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of a head of a query that is its sequence's only one, those that have tiles, combined with the sink
    and turned back. BLOCK_S of them are read at once."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    cos, sin = angles(cos_sin, tl.load(positions + first_token + t), DIM, ROPE, BLOCK)
    sink = tl.load(sinks + h).to(tl.float32)
    _, _, _, tiles = _tiles_of(tl.load(context_len + t) - 1, WINDOW, RATIO, CHOSEN, BLOCK_N)
    used = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, SPLITS), 1))
    if PDL:
        gdc_wait()
    cell = t * HEADS + h
    stride = tokens.to(tl.int64) * HEADS
    top = sink
    total = tl.full((), 1.0, tl.float32)
    o = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, used, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        there = split < used
        place = cell + split * stride
        taken = tl.load(partials + place[:, None] * DIM + d[None], mask=there[:, None] & (d < DIM)[None], other=0.0)
        best = tl.load(sums + place * 2, mask=there, other=float("-inf"))
        seen = tl.load(sums + place * 2 + 1, mask=there, other=0.0)
        above = tl.maximum(top, tl.max(best, 0))
        weight = tl.exp(best - above)
        fade = tl.exp(top - above)
        o = o * fade + tl.sum(taken * weight[:, None], 0)
        total = total * fade + tl.sum(weight * seen, 0)
        top = above
    # by minus the angle
    o = turn_pairs((o / total)[None, :], cos, -sin, 1, BLOCK)
    place = (first_token + t) * (HEADS * DIM) + h * DIM + d
    tl.store(out + place[None, :], o.to(out.dtype.element_ty), mask=(d < DIM)[None, :])


def sparse_attention(
    workspace: Workspace,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    window: int,
    entries: torch.Tensor | None = None,
    entry_table: torch.Tensor | None = None,
    ratio: int = 0,
    chosen: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See the reference. The last axis of every tensor is dense; every token belongs to a sequence."""
    t, heads, dim = q.shape
    seqs = batch.context_len.shape[0]
    q = q.contiguous()
    out = torch.empty_like(q)
    if not t:
        return out
    pdl = workspace.pdl
    ratio = 0 if entries is None else ratio
    most = 0 if chosen is None else chosen.shape[1]
    read = (most or batch.max_context // ratio) if ratio else 0
    alone = 0 if deterministic else batch.num_single
    for first, count, longest, first_token, tokens in (
        (0, alone, 1, 0, alone),
        (alone, seqs - alone, batch.max_query, alone, t - alone),
    ):
        if not count:
            continue
        cut = divided(count, heads, window, read, q.device) if first < alone else whole(heads, q.device)
        splits = cut.splits
        kept = torch.float32 if splits > 1 else q.dtype
        partials = torch.empty(splits, tokens, heads, dim, dtype=kept, device=q.device)
        sums = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=q.device)
        workspace.launch(_attend, (count, longest, cdiv(heads, cut.heads) * splits))(
            q,
            cache,
            block_table,
            batch.query_start,
            batch.context_len,
            entries if entries is not None else cache,
            entry_table if entry_table is not None else block_table,
            chosen if chosen is not None else block_table,
            partials,
            sums,
            scale,
            first,
            first_token,
            tokens,
            block_table.stride(0),
            cache.stride(0),
            cache.stride(1),
            0 if entry_table is None else entry_table.stride(0),
            0 if entries is None else entries.stride(0),
            0 if entries is None else entries.stride(1),
            HEADS=heads,
            DIM=dim,
            WINDOW=window,
            BLOCK_SIZE=cache.shape[1],
            RATIO=ratio,
            PER_BLOCK=1 if entries is None else entries.shape[1],
            CHOSEN=most,
            SPLITS=splits,
            BLOCK_H=cut.heads,
            BLOCK_D=max(16, next_power_of_2(dim)),
            BLOCK_N=cut.keys,
            ONE=cut.one,
            num_stages=STAGES,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=cut.warps,
        )
        turned = {"HEADS": heads, "DIM": dim, "ROPE": cos_sin.shape[1], "BLOCK": next_power_of_2(dim), "PDL": pdl}
        if splits == 1:
            finished = min(next_power_of_2(heads), max(1, 2048 // next_power_of_2(dim)))
            workspace.launch(_finish, (tokens, cdiv(heads, finished)))(
                partials, sums, sinks, positions, cos_sin, out, first_token,
                BLOCK_H=finished, launch_pdl=pdl, num_warps=4, **turned,
            )  # fmt: skip
            continue
        workspace.launch(_combine, (tokens, heads))(
            partials, sums, sinks, positions, batch.context_len, cos_sin, out, first_token, tokens,
            WINDOW=window, RATIO=ratio, CHOSEN=most, SPLITS=splits, BLOCK_N=cut.keys,
            BLOCK_S=min(COMBINED, next_power_of_2(splits)), launch_pdl=pdl, num_warps=4, **turned,
        )  # fmt: skip
    return out
