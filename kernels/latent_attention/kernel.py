"""Attention over a latent cache: a program takes some queries and heads of a line and reads each entry once for all.

Lines of one query are split along their tokens when there are few of them; the parts are joined by their softmax sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 264  # two for each processor of the largest GPU served


@triton.jit(do_not_specialize=["first_line", "tokens"])
def _attend(
    q,
    q_rope,
    cache,
    block_table,
    query_start,
    context_len,
    out,
    part,
    sums,
    scale,
    first_line,
    tokens,
    table_stride,
    block_stride,
    entry_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    line = first_line + tl.program_id(0)
    head_tiles = tl.cdiv(HEADS, BLOCK_H)
    query = tl.program_id(1) // head_tiles * QUERIES
    split = tl.program_id(2)
    lo = tl.load(query_start + line)
    count = tl.load(query_start + line + 1) - lo
    length = tl.load(context_len + line)
    if query >= count:
        return
    row = tl.arange(0, QUERIES * BLOCK_H)
    head = tl.program_id(1) % head_tiles * BLOCK_H + row % BLOCK_H
    which = query + row // BLOCK_H
    live = (head < HEADS) & (which < count)
    token = (lo + which).to(tl.int64)
    position = length - count + which

    d = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    base = (token * HEADS + head)[:, None]
    ql = tl.load(q + base * LATENT + d[None], mask=live[:, None] & (d < LATENT)[None], other=0.0)
    qr = tl.load(q_rope + base * ROPE + r[None], mask=live[:, None] & (r < ROPE)[None], other=0.0)
    best = tl.full((QUERIES * BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES * BLOCK_H,), tl.float32)
    acc = tl.zeros((QUERIES * BLOCK_H, BLOCK_L), tl.float32)

    end = tl.minimum(length, length - count + query + QUERIES)
    span = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_N) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    for first in range(split * span, tl.minimum(end, (split + 1) * span), BLOCK_N):
        j = first + n
        block = tl.load(block_table + line.to(tl.int64) * table_stride + j // BLOCK_SIZE, mask=j < end, other=0)
        entry = cache + block.to(tl.int64) * block_stride + j % BLOCK_SIZE * entry_stride
        c = tl.load(entry[:, None] + d[None], mask=(j < end)[:, None] & (d < LATENT)[None], other=0.0)
        kr = tl.load(entry[:, None] + LATENT + r[None], mask=(j < end)[:, None] & (r < ROPE)[None], other=0.0)
        s = tl.dot(ql, tl.trans(c), input_precision=PRECISION)
        s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION) * scale
        s = tl.where((j[None] <= position[:, None]) & (j < end)[None], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        # A row that has seen no key yet keeps −inf; its weights are 0, not NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp(s - shift[:, None])
        fade = tl.exp(best - shift)
        total = total * fade + tl.sum(w, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(w.to(c.dtype), c, acc, input_precision=PRECISION)
        best = top
    if SPLITS == 1:
        o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + base * LATENT + d[None], o.to(out.dtype.element_ty), mask=live[:, None] & (d < LATENT)[None])
    else:
        place = (split * tokens + token) * HEADS + head
        tl.store(part + place[:, None] * LATENT + d[None], acc, mask=live[:, None] & (d < LATENT)[None])
        tl.store(sums + place * 2, best, mask=live)
        tl.store(sums + place * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _join(
    part,
    sums,
    out,
    query_start,
    tokens,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    token = tl.load(query_start + tl.program_id(0)).to(tl.int64)
    if tl.load(query_start + tl.program_id(0) + 1) == token:
        return
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_L)
    best = tl.full((), float("-inf"), tl.float32)
    for s in range(SPLITS):
        best = tl.maximum(best, tl.load(sums + ((s * tokens + token) * HEADS + head) * 2))
    best = tl.where(best == float("-inf"), 0.0, best)
    acc = tl.zeros((BLOCK_L,), tl.float32)
    total = tl.zeros((), tl.float32)
    for s in range(SPLITS):
        place = (s * tokens + token) * HEADS + head
        w = tl.exp(tl.load(sums + place * 2) - best)
        total += w * tl.load(sums + place * 2 + 1)
        acc += w * tl.load(part + place * LATENT + d, mask=d < LATENT, other=0.0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (token * HEADS + head) * LATENT + d, acc.to(out.dtype.element_ty), mask=d < LATENT)


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    num_single: int,
    max_query: int,
    max_context: int,
) -> torch.Tensor:
    """See the reference."""
    t, heads, latent = q.shape
    lines = context_len.shape[0]
    q, q_rope = q.contiguous(), q_rope.contiguous()
    out = torch.zeros_like(q)
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    head_tiles = triton.cdiv(heads, block_h)
    block_l = max(16, triton.next_power_of_2(latent))

    def launch(first: int, count: int, queries: int, longest: int, splits: int) -> None:
        part = torch.empty(splits, t, heads, latent, dtype=torch.float32, device=q.device) if splits > 1 else out
        sums = torch.empty(splits, t, heads, 2, dtype=torch.float32, device=q.device) if splits > 1 else out
        _attend[(count, triton.cdiv(longest, queries) * head_tiles, splits)](
            q,
            q_rope,
            cache,
            block_table,
            query_start,
            context_len,
            out,
            part,
            sums,
            scale,
            first,
            t,
            block_table.stride(0),
            cache.stride(0),
            cache.stride(1),
            HEADS=heads,
            LATENT=latent,
            ROPE=q_rope.shape[-1],
            BLOCK_SIZE=cache.shape[1],
            QUERIES=queries,
            BLOCK_H=block_h,
            BLOCK_L=block_l,
            BLOCK_R=max(16, triton.next_power_of_2(q_rope.shape[-1])),
            BLOCK_N=32,
            SPLITS=splits,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=8,
            num_stages=2,
        )
        if splits > 1:
            _join[(count, heads)](
                part, sums, out, query_start, t, HEADS=heads, LATENT=latent, SPLITS=splits, BLOCK_L=block_l
            )

    if num_single:
        wanted = triton.cdiv(PROGRAMS, num_single * head_tiles)
        launch(0, num_single, 1, 1, max(1, min(wanted, triton.cdiv(max_context, 128), 64)))
    if lines > num_single:
        launch(num_single, lines - num_single, max(1, 64 // block_h), max_query, 1)
    return out
