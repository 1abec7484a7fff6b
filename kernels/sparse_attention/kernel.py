# mypy: disable-error-code="no-untyped-def"
"""Attention over a window and over compressed entries: a program takes a query's heads, as rows of the tensor cores,
and a split of what the query reads; then the splits are joined and turned back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import AttentionBatch
from kernels.hardware import multiprocessors
from kernels.rotate_tail.kernel import angles, turn_pairs
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

BLOCK_N, WARPS, STAGES = 32, 8, 2
MAX_SPLITS = 16


@triton.jit
def _look_up(
    tile,
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
    """What a tile of BLOCK_N reads: tokens of the window, or entries. Gives their blocks, places in them and mask."""
    j = start + tile * BLOCK_N + n
    in_window = j <= tl.where(tile < tiles_in_window, p, -1)
    block = tl.load(table + j // BLOCK_SIZE, mask=in_window, other=0)
    place = j % BLOCK_SIZE
    live = in_window
    if RATIO:
        i = (tile - tiles_in_window) * BLOCK_N + n
        within = (i >= 0) & (i < end)
        e = i
        if CHOSEN:
            e = tl.load(chosen + i, mask=within, other=-1)
        within = within & (e >= 0) & (e < ready)
        block = tl.where(within, tl.load(entry_table + e // PER_BLOCK, mask=within, other=0), block)
        place = tl.where(within, e % PER_BLOCK, place)
        live = live | within
    return block, place, live


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
    STAGES: tl.constexpr,
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
    tiles_in_window = tl.cdiv(p + 1 - start, BLOCK_N)
    ready = 0
    end = 0
    if RATIO:
        ready = (p + 1) // RATIO
        end = tl.minimum(ready, CHOSEN) if CHOSEN else ready
    tiles = tiles_in_window + tl.cdiv(end, BLOCK_N)
    first = tiles * split // SPLITS
    last = tiles * (split + 1) // SPLITS
    table = block_table + seq * table_stride
    e_table = entry_table + seq * entry_table_stride
    picked = chosen + token * CHOSEN
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    if PDL:
        gdc_wait()

    x = tl.load(q + (token * HEADS + h)[:, None] * DIM + d[None], mask=inside, other=0.0)
    block, place, live = _look_up(
        first, tiles_in_window, start, p, picked, end, ready, table, e_table, n,
        BLOCK_SIZE, RATIO, PER_BLOCK, CHOSEN, BLOCK_N,
    )  # fmt: skip
    for tile in tl.range(first, last, num_stages=STAGES):
        row = cache + block.to(tl.int64) * block_stride + place * row_stride
        if RATIO:
            other = entries + block.to(tl.int64) * entry_block_stride + place * entry_stride
            row = tl.where(tile < tiles_in_window, row, other)
        c = tl.load(row[:, None] + d[None], mask=live[:, None] & (d < DIM)[None], other=0.0)
        read = live
        # the next tile is looked up while this one is on its way
        block, place, live = _look_up(
            tile + 1, tiles_in_window, start, p, picked, end, ready, table, e_table, n,
            BLOCK_SIZE, RATIO, PER_BLOCK, CHOSEN, BLOCK_N,
        )  # fmt: skip
        s = tl.dot(x, tl.trans(c), input_precision=PRECISION) * scale
        s = tl.where(read[None], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp(s - shift[:, None])
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


@triton.jit(do_not_specialize=["first_token", "tokens"], do_not_specialize_on_alignment=["positions"])
def _combine(
    partials,
    sums,
    sinks,
    positions,
    cos_sin,
    out,
    first_token,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.arange(0, BLOCK_S)
    m_h = h < HEADS
    d = tl.arange(0, BLOCK)
    cos, sin = angles(cos_sin, tl.load(positions + first_token + t), DIM, ROPE, BLOCK)
    sink = tl.load(sinks + h, mask=m_h, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    cell = (t * HEADS + h)[:, None] + split[None].to(tl.int64) * (tokens * HEADS)
    there = m_h[:, None] & (split < SPLITS)[None]
    best = tl.load(sums + cell * 2, mask=there, other=float("-inf"))
    total = tl.load(sums + cell * 2 + 1, mask=there, other=0.0)
    top = tl.maximum(tl.max(best, 1), sink)
    weight = tl.exp(best - top[:, None])
    scale = 1.0 / (tl.sum(weight * total, 1) + tl.exp(sink - top))
    inside = m_h[:, None] & (d < DIM)[None]
    mine = (t * HEADS + h)[:, None] * DIM + d[None]
    if SPLITS == 1:
        # partials hold the mean without the sink
        factor = tl.sum(weight * total, 1) * scale
        o = tl.load(partials + mine, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
    else:
        o = tl.zeros((BLOCK_H, BLOCK), tl.float32)
        for one in tl.static_range(SPLITS):
            factor = tl.sum(tl.where(split[None] == one, weight, 0.0), 1) * scale
            there_to = partials + one * tokens.to(tl.int64) * (HEADS * DIM)
            o += tl.load(there_to + mine, mask=inside, other=0.0) * factor[:, None]
    # turned back: by minus the angle
    o = turn_pairs(o, cos, -sin, BLOCK_H, BLOCK)
    place = (first_token + t) * (HEADS * DIM) + h[:, None] * DIM + d[None]
    tl.store(out + place, o.to(out.dtype.element_ty), mask=inside)


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
    num_single = batch.num_single
    t, heads, dim = q.shape
    seqs = batch.context_len.shape[0]
    q = q.contiguous()
    out = torch.empty_like(q)
    if not t:
        return out
    pdl = workspace.pdl
    ratio = 0 if entries is None else ratio
    most = 0 if chosen is None else chosen.shape[1]
    block_h = min(64, max(16, next_power_of_2(heads)))
    tall = cdiv(heads, block_h)
    tiles = cdiv(window, BLOCK_N) + (cdiv(most or batch.max_context // ratio, BLOCK_N) if ratio else 0)
    alone = 0 if deterministic else num_single
    for first, count, longest, first_token, tokens in (
        (0, alone, 1, 0, alone),
        (alone, seqs - alone, batch.max_query, alone, t - alone),
    ):
        if not count:
            continue
        splits = 1
        if longest == 1 and not deterministic:
            # one program fills a multiprocessor
            splits = max(1, multiprocessors(q.device) // (count * tall))
            splits = min(1 << (splits.bit_length() - 1), MAX_SPLITS, next_power_of_2(tiles))
        kept = torch.float32 if splits > 1 else q.dtype
        partials = torch.empty(splits, tokens, heads, dim, dtype=kept, device=q.device)
        sums = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=q.device)
        workspace.launch(_attend, (count, longest, tall * splits))(
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
            BLOCK_H=block_h,
            BLOCK_D=max(16, next_power_of_2(dim)),
            BLOCK_N=BLOCK_N,
            STAGES=STAGES,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=WARPS,
        )
        combined_h = min(next_power_of_2(heads), max(1, 2048 // next_power_of_2(dim)))
        workspace.launch(_combine, (tokens, cdiv(heads, combined_h)))(
            partials,
            sums,
            sinks,
            positions,
            cos_sin,
            out,
            first_token,
            tokens,
            HEADS=heads,
            DIM=dim,
            ROPE=cos_sin.shape[1],
            SPLITS=splits,
            BLOCK_S=max(2, next_power_of_2(splits)),
            BLOCK_H=combined_h,
            BLOCK=next_power_of_2(dim),
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
    return out
