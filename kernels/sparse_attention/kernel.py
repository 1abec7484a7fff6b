"""Attention over a window and over compressed entries: one program a query and a tile of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _fold(q, place, live, d, dim, scale, best, total, acc, PRECISION: tl.constexpr):
    """One tile of entries into the running softmax."""
    c = tl.load(place[:, None] + d[None], mask=live[:, None] & (d < dim)[None], other=0.0)
    s = tl.dot(q, tl.trans(c), input_precision=PRECISION) * scale
    s = tl.where(live[None], s, float("-inf"))
    top = tl.maximum(best, tl.max(s, 1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp(s - shift[:, None])
    fade = tl.exp(best - shift)
    acc = tl.dot(w.to(c.dtype), c, acc * fade[:, None], input_precision=PRECISION)
    return top, total * fade + tl.sum(w, 1), acc


@triton.jit(do_not_specialize=["first_line"])
def _attend(
    q,
    cache,
    block_table,
    query_start,
    context_len,
    sinks,
    entries,
    entry_table,
    chosen,
    out,
    scale,
    first_line,
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
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    line = (first_line + tl.program_id(0)).to(tl.int64)
    lo = tl.load(query_start + line)
    count = tl.load(query_start + line + 1) - lo
    length = tl.load(context_len + line)
    which = tl.program_id(1)
    if (which >= count) | (length == 0):
        return
    token = (lo + which).to(tl.int64)
    p = length - count + which
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    head = (token * HEADS + h)[:, None] * DIM + d[None]
    inside = (h < HEADS)[:, None] & (d < DIM)[None]
    x = tl.load(q + head, mask=inside, other=0.0)
    best = tl.load(sinks + h, mask=h < HEADS, other=0.0).to(tl.float32)
    total = tl.full((BLOCK_H,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)

    for first in range(tl.maximum(0, p - WINDOW + 1), p + 1, BLOCK_N):
        j = first + n
        block = tl.load(block_table + line * table_stride + j // BLOCK_SIZE, mask=j <= p, other=0)
        place = cache + block.to(tl.int64) * block_stride + j % BLOCK_SIZE * row_stride
        best, total, acc = _fold(x, place, j <= p, d, DIM, scale, best, total, acc, PRECISION)
    if RATIO:
        ready = (p + 1) // RATIO
        end = tl.minimum(ready, CHOSEN) if CHOSEN else ready
        for first in range(0, end, BLOCK_N):
            i = first + n
            if CHOSEN:
                e = tl.load(chosen + token * CHOSEN + i, mask=i < end, other=-1)
            else:
                e = tl.where(i < end, i, -1)
            live = (e >= 0) & (e < ready)
            block = tl.load(entry_table + line * entry_table_stride + e // PER_BLOCK, mask=live, other=0)
            place = entries + block.to(tl.int64) * entry_block_stride + e % PER_BLOCK * entry_stride
            best, total, acc = _fold(x, place, live, d, DIM, scale, best, total, acc, PRECISION)
    tl.store(out + head, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_back(
    x, positions, cos_sin, out, HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = 2 * i < DIM
    plain: tl.constexpr = (DIM - ROPE) // 2
    angle = cos_sin + tl.load(positions + t).to(tl.int64) * ROPE + i - plain
    cos = tl.load(angle, mask=live & (i >= plain), other=1.0)
    sin = tl.load(angle + ROPE // 2, mask=live & (i >= plain), other=0.0)
    row = (t * HEADS + tl.program_id(1)) * DIM + 2 * i
    a = tl.load(x + row, mask=live, other=0.0)
    b = tl.load(x + row + 1, mask=live, other=0.0)
    tl.store(out + row, (a * cos + b * sin).to(out.dtype.element_ty), mask=live)
    tl.store(out + row + 1, (b * cos - a * sin).to(out.dtype.element_ty), mask=live)


def sparse_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    window: int,
    num_single: int,
    max_query: int,
    max_context: int,
    entries: torch.Tensor | None = None,
    entry_table: torch.Tensor | None = None,
    ratio: int = 0,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the reference. The last axis of every tensor is dense."""
    t, heads, dim = q.shape
    lines = context_len.shape[0]
    q = q.contiguous()
    mixed = torch.zeros(t, heads, dim, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    if not t:
        return out
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    for first, count, longest in ((0, num_single, 1), (num_single, lines - num_single, max_query)):
        if count:
            _attend[(count, longest, triton.cdiv(heads, block_h))](
                q,
                cache,
                block_table,
                query_start,
                context_len,
                sinks,
                entries,
                entry_table,
                chosen,
                mixed,
                scale,
                first,
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
                RATIO=0 if entries is None else ratio,
                PER_BLOCK=1 if entries is None else entries.shape[1],
                CHOSEN=0 if chosen is None else chosen.shape[1],
                BLOCK_H=block_h,
                BLOCK_D=max(16, triton.next_power_of_2(dim)),
                BLOCK_N=32,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                num_warps=8,
                num_stages=2,
            )
    _turn_back[(t, heads)](
        mixed,
        positions,
        cos_sin,
        out,
        HEADS=heads,
        DIM=dim,
        ROPE=cos_sin.shape[1],
        BLOCK=triton.next_power_of_2(dim // 2),
        num_warps=1,
    )
    return out
