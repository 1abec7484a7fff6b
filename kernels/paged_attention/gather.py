# mypy: disable-error-code="no-untyped-def"
"""Copies keys and values of some lines out of their blocks into one piece each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Keys a program copies; a line's piece is padded to a multiple of this.
KEYS = 128


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


def gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    first_line: int,
    num_lines: int,
    max_context: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values [num_lines · G · padded, D] of lines from `first_line` on, line by line, and `padded`.

    `padded` is max_context up to a multiple of KEYS. A line's last tile is filled with zeros; tiles past that are left
    as they are. Keys and values of equal width, a power of two from 16 on.
    """
    _, g, block_size, d = k_cache.shape
    padded = triton.cdiv(max_context, KEYS) * KEYS
    k, v = torch.empty((2, num_lines * g * padded, d), dtype=k_cache.dtype, device=k_cache.device).unbind()
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
    return k, v, padded
