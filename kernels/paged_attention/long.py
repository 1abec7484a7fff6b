# mypy: disable-error-code="no-untyped-def"
"""Paged attention for many queries: keys and values gathered into one piece, then read by the bulk copy engine.

A paged cache is read pointer by pointer; gathered once a layer (3 % of the attention of 16,384 tokens, measured),
it is read in whole tiles by tensor descriptors (TMA), which leaves the warps to the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.paged_attention.attend import LOG2E
from kernels.paged_attention.gather import gather


@dataclass(frozen=True, slots=True)
class LongTile:
    """Rows (queries × heads of a group) and keys a tile, which divide KEYS, warps, pipeline depth."""

    rows: int
    keys: int
    warps: int
    stages: int


# Measured on an H200: two programs of one warp group on a multiprocessor fill each other's gaps.
TILE = LongTile(64, 64, warps=4, stages=3)
# Lines that one compiled kernel serves; more of them take another.
LINES = 64


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
    g = k_cache.shape[1]
    group = h // g
    k, v, padded = gather(k_cache, v_cache, block_table, context_len, first_line, num_lines, max_context)
    tile = TILE
    block_q = tile.rows // group
    _attend[(tokens // block_q + num_lines, g)](
        q,
        TensorDescriptor(k, list(k.shape), list(k.stride()), [tile.keys, d]),
        TensorDescriptor(v, list(v.shape), list(v.stride()), [tile.keys, d]),
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
        BLOCK_M=tile.rows,
        BLOCK_Q=block_q,
        BLOCK_N=tile.keys,
        BLOCK_B=max(LINES, triton.next_power_of_2(num_lines)),
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
