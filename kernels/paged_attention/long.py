# mypy: disable-error-code="no-untyped-def"
"""Paged attention for many queries: keys and values gathered into one piece, then read by the bulk copy engine.

A paged cache is read pointer by pointer; gathered once a layer (3 % of the attention of 16,384 tokens, measured),
it is read in whole tiles by tensor descriptors (TMA), which leaves the warps to the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.paged_attention.attend import LOG2E

ROWS, KEYS = 128, 128
# Lines that one compiled kernel serves; more of them take another.
LINES = 64


@triton.jit(do_not_specialize=["first_line"], do_not_specialize_on_alignment=["p_context"])
def _gather(
    p_k_cache,
    p_v_cache,
    p_table,
    p_context,
    p_k,
    p_v,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    table_stride,
    first_line,
    padded,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of keys and values of one line and kv head; places past the context become zero."""
    first = tl.program_id(0) * BLOCK_N
    i_group = tl.program_id(1).to(tl.int64)
    i_line = tl.program_id(2)
    length = tl.load(p_context + first_line + i_line)
    if first >= length:
        return
    key = first + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, D)[None, :]
    held = key < length
    p_blocks = p_table + (first_line + i_line).to(tl.int64) * table_stride
    block = tl.load(p_blocks + key // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
    place = key % BLOCK_SIZE
    p_from = p_k_cache + i_group * k_head_stride + (block * k_block_stride + place * k_slot_stride)[:, None]
    k = tl.load(p_from + channel, mask=held[:, None], other=0.0)
    p_from = p_v_cache + i_group * v_head_stride + (block * v_block_stride + place * v_slot_stride)[:, None]
    v = tl.load(p_from + channel, mask=held[:, None], other=0.0)
    at = (((i_line * G + i_group) * padded + key) * D)[:, None] + channel
    tl.store(p_k + at, k)
    tl.store(p_v + at, v)


@triton.jit
def _fold(
    acc,
    m,
    l,
    q,
    k_rows,
    v_rows,
    row,
    position,
    start,
    stop,
    scale,
    softcap,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    for first in tl.range(start, stop, BLOCK_N):
        k = k_rows.load([row + first, 0])
        s = tl.dot(q, k.T)
        if HAS_SOFTCAP:
            s = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * scale / softcap * s) - 1.0)
            factor = 1.0
        else:
            factor = scale * LOG2E
        if IS_MASKED:
            key = first + tl.arange(0, BLOCK_N)
            s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1) * factor)
        weight = tl.exp2(s * factor - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(weight, axis=1)
        v = v_rows.load([row + first, 0])
        acc = tl.dot(weight.to(q.dtype), v, acc * shrink[:, None])
        m = top
    return acc, m, l


@triton.jit(
    do_not_specialize=["first_line", "num_lines"],
    do_not_specialize_on_alignment=["p_query_start", "p_context"],
)
def _attend(
    p_q,
    k_rows,
    v_rows,
    p_query_start,
    p_context,
    p_sinks,
    p_out,
    q_stride,
    scale,
    softcap,
    first_line,
    num_lines,
    padded,
    H: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One tile of queries (rows are queries × heads of a kv group) over all keys that it sees."""
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_group = tl.program_id(1)
    origin = tl.load(p_query_start + first_line)
    lines = tl.arange(0, BLOCK_B)
    starts = tl.load(p_query_start + first_line + lines, mask=lines < num_lines, other=1 << 30)
    begun = (starts - origin) // BLOCK_Q + lines <= i_tile
    i_line = tl.sum(begun.to(tl.int32), axis=0) - 1
    line = first_line + i_line
    query_first = tl.load(p_query_start + line)
    count = tl.load(p_query_start + line + 1) - query_first
    tile_query = (i_tile - (query_first - origin) // BLOCK_Q - i_line) * BLOCK_Q
    if tile_query >= count:
        return
    length = tl.load(p_context + line)
    past = tl.maximum(length - count, 0)
    rows = tl.arange(0, BLOCK_M)
    query = tile_query + rows // GROUP
    head = i_group * GROUP + rows % GROUP
    m_rows = (rows < BLOCK_Q * GROUP) & (query < count)
    channel = tl.arange(0, D)
    token = (query_first + query).to(tl.int64)
    q = tl.load(p_q + token[:, None] * q_stride + head[:, None] * D + channel[None, :], mask=m_rows[:, None], other=0.0)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        m = tl.load(p_sinks + head, mask=m_rows, other=0.0).to(tl.float32) * LOG2E
        l = l + 1.0
    stop = tl.minimum(length, past + tile_query + BLOCK_Q)
    plain = tl.minimum((past + tile_query + 1) // BLOCK_N * BLOCK_N, stop)
    row = (i_line * G + i_group) * padded
    acc, m, l = _fold(
        acc, m, l, q, k_rows, v_rows, row, past + query, 0, plain, scale, softcap, BLOCK_N, HAS_SOFTCAP, False
    )
    acc, m, l = _fold(
        acc, m, l, q, k_rows, v_rows, row, past + query, plain, stop, scale, softcap, BLOCK_N, HAS_SOFTCAP, True
    )
    acc = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    p_rows = p_out + (token[:, None] * H + head[:, None]) * D + channel[None, :]
    tl.store(p_rows, acc.to(p_out.dtype.element_ty), mask=m_rows[:, None])


def attend_long(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    first_line: int,
    num_lines: int,
    tokens: int,
    max_context: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """`paged_attention` of `num_lines` lines from `first_line` on, `tokens` queries in all, written into `out`.

    No window; keys and values of equal width, a power of two from 16 to 128, in bfloat16 or float16.
    """
    _, h, d = q.shape
    _, g, block_size, _ = k_cache.shape
    group = h // g
    padded = triton.cdiv(max_context, KEYS) * KEYS
    k, v = torch.empty((2, num_lines * g * padded, d), dtype=q.dtype, device=q.device).unbind()
    _gather[(padded // KEYS, g, num_lines)](
        k_cache,
        v_cache,
        block_table,
        context_len,
        k,
        v,
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        first_line,
        padded,
        G=g,
        D=d,
        BLOCK_SIZE=block_size,
        BLOCK_N=KEYS,
        num_warps=8,
    )
    block_q = ROWS // group
    _attend[(tokens // block_q + num_lines, g)](
        q,
        TensorDescriptor(k, list(k.shape), list(k.stride()), [KEYS, d]),
        TensorDescriptor(v, list(v.shape), list(v.stride()), [KEYS, d]),
        query_start,
        context_len,
        sinks if sinks is not None else q,
        out,
        q.stride(0),
        scale,
        softcap if softcap is not None else 0.0,
        first_line,
        num_lines,
        padded,
        H=h,
        G=g,
        GROUP=group,
        D=d,
        BLOCK_M=ROWS,
        BLOCK_Q=block_q,
        BLOCK_N=KEYS,
        BLOCK_B=max(LINES, triton.next_power_of_2(num_lines)),
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=8,
        num_stages=3,
    )
