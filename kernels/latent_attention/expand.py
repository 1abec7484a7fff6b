# mypy: disable-error-code="no-untyped-def"
"""Lines of many queries: their latents are gathered and taken through the up-projection once, then each head attends
to its own keys and values, which are a third as wide as the latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.latent_attention.reference import Spans

LOG2E = tl.constexpr(1.4426950408889634)
# Lines that one compiled kernel serves; more of them take another.
LINES = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys a tile, pipeline depth, warps."""

    queries: int
    keys: int
    stages: int
    warps: int


@triton.jit
def _rows_before(context_len, first_line, i_line, BLOCK_B: tl.constexpr):
    """Entries of the lines before line `i_line`."""
    line = tl.arange(0, BLOCK_B)
    return tl.sum(tl.load(context_len + first_line + line, mask=line < i_line, other=0), 0)


@triton.jit(do_not_specialize=["first_line"], do_not_specialize_on_alignment=["context_len"])
def _gather(
    cache,
    block_table,
    context_len,
    entries,
    table_stride,
    block_stride,
    entry_stride,
    first_line,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Some entries of a line, one line after another."""
    i_line = tl.program_id(1)
    length = tl.load(context_len + first_line + i_line)
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(0) * BLOCK_N >= length:
        return
    row = _rows_before(context_len, first_line, i_line, BLOCK_B) + j
    w = tl.arange(0, BLOCK_W)[None, :]
    held = (j < length)[:, None] & (w < WIDTH)
    block = tl.load(
        block_table + (first_line + i_line).to(tl.int64) * table_stride + j // BLOCK_SIZE, mask=j < length, other=0
    )
    entry = cache + (block.to(tl.int64) * block_stride + j % BLOCK_SIZE * entry_stride)[:, None]
    tl.store(entries + row.to(tl.int64)[:, None] * WIDTH + w, tl.load(entry + w, mask=held, other=0.0), mask=held)


@triton.jit
def _fold(
    acc,
    m,
    l,
    qn,
    qr,
    keys,
    values,
    rotated,
    row,
    column,
    position,
    start,
    stop,
    scale,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for first in tl.range(start, stop, BLOCK_N):
        k = keys.load([row + first, column])
        r = rotated.load([row + first, LATENT])
        s = tl.dot(qn, k.T, input_precision=PRECISION)
        s = tl.dot(qr, r.T, s, input_precision=PRECISION)
        if MASKED:
            s = tl.where((first + tl.arange(0, BLOCK_N))[None, :] <= position[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
        w = tl.exp2(s * (scale * LOG2E) - top[:, None])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(w, 1)
        v = values.load([row + first, column + NOPE])
        acc = tl.dot(w.to(qn.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m = top
    return acc, m, l


@triton.jit(
    do_not_specialize=["first_line", "num_lines"],
    do_not_specialize_on_alignment=["query_start", "context_len"],
)
def _attend(
    q,
    keys,
    values,
    rotated,
    query_start,
    context_len,
    out,
    q_token_stride,
    q_head_stride,
    scale,
    first_line,
    num_lines,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of a line's queries, one head, over all keys that they see."""
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    origin = tl.load(query_start + first_line)
    lines = tl.arange(0, BLOCK_B)
    starts = tl.load(query_start + first_line + lines, mask=lines < num_lines, other=1 << 30)
    begun = (starts - origin) // BLOCK_M + lines <= i_tile
    i_line = tl.sum(begun.to(tl.int32), 0) - 1
    line = first_line + i_line
    query_first = tl.load(query_start + line)
    count = tl.load(query_start + line + 1) - query_first
    first_query = (i_tile - (query_first - origin) // BLOCK_M - i_line) * BLOCK_M
    if first_query >= count:
        return
    length = tl.load(context_len + line)
    past = length - count
    query = first_query + tl.arange(0, BLOCK_M)
    live = (query < count)[:, None]
    token = (query_first + query).to(tl.int64)
    own = q + token[:, None] * q_token_stride + head * q_head_stride
    qn = tl.load(own + tl.arange(0, NOPE)[None, :], mask=live, other=0.0)
    qr = tl.load(own + NOPE + tl.arange(0, ROPE)[None, :], mask=live, other=0.0)
    acc = tl.zeros((BLOCK_M, VALUE), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    stop = tl.minimum(length, past + first_query + BLOCK_M)
    plain = tl.minimum((past + first_query + 1) // BLOCK_N * BLOCK_N, stop)
    row = _rows_before(context_len, first_line, i_line, BLOCK_B)
    column = head * (NOPE + VALUE)
    acc, m, l = _fold(
        acc, m, l, qn, qr, keys, values, rotated, row, column, past + query, 0, plain, scale, NOPE, LATENT, BLOCK_N,
        False, PRECISION,
    )  # fmt: skip
    acc, m, l = _fold(
        acc, m, l, qn, qr, keys, values, rotated, row, column, past + query, plain, stop, scale, NOPE, LATENT, BLOCK_N,
        True, PRECISION,
    )  # fmt: skip
    acc = acc / l[:, None]
    place = (token[:, None] * HEADS + head) * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=live)


def attend_expanded(
    q: torch.Tensor,
    kv_up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    first_line: int,
    spans: Spans,
    tile: Tile,
) -> None:
    """`latent_attention` of the lines of `spans`, which start at line and token `first_line`, written into `out`.

    The parts of a head are powers of two from 16 on.
    """
    heads, own, latent = kv_up.shape
    width, value = cache.shape[-1], out.shape[-1]
    rope, nope = width - latent, own - value
    lines, total = len(spans), sum(length for _, _, length in spans)
    block_b = max(LINES, triton.next_power_of_2(lines))
    entries = torch.empty(total, width, dtype=cache.dtype, device=cache.device)
    longest = max(length for _, _, length in spans)
    _gather[(triton.cdiv(longest, 32), lines)](
        cache, block_table, context_len, entries, block_table.stride(0), cache.stride(0), cache.stride(1), first_line,
        WIDTH=width, BLOCK_SIZE=cache.shape[1], BLOCK_N=32, BLOCK_W=triton.next_power_of_2(width), BLOCK_B=block_b,
        num_warps=8,
    )  # fmt: skip
    kv = torch.nn.functional.linear(entries[:, :latent], kv_up.flatten(0, 1))

    def rows(source: torch.Tensor, channels: int) -> TensorDescriptor:
        return TensorDescriptor(source, list(source.shape), list(source.stride()), [tile.keys, channels])

    tokens = sum(count for _, count, _ in spans)
    _attend[(tokens // tile.queries + lines, heads)](
        q, rows(kv, nope), rows(kv, value), rows(entries, rope), query_start, context_len, out, q.stride(0),
        q.stride(1), scale, first_line, lines, HEADS=heads, NOPE=nope, ROPE=rope, VALUE=value, LATENT=latent,
        BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_B=block_b,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
