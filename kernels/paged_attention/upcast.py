# mypy: disable-error-code="no-untyped-def"
"""Caches of 8-bit floats, written out in the queries' dtype for sequences of many queries: what these read is read once
for each 128 of their queries, so that one more pass costs little, and kernels that multiply 16-bit numbers serve
both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cache_scales import FP8
from kernels.hardware import group_products
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# The most bytes that keys and values may take, and sequences that one compiled kernel serves; more of them take
# another.
MAX_BYTES, SEQS = 1 << 30, 128


@dataclass(frozen=True, slots=True)
class UpcastCache:
    """Keys and values [blocks, G, block_size, D] of some sequences, one sequence behind another, and a table [B, M]
    of which their rows are filled."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor


@triton.jit(do_not_specialize=["first_seq", "num_seqs"], do_not_specialize_on_alignment=["p_context"])
def _upcast(
    p_k_cache,
    p_v_cache,
    p_table,
    p_context,
    p_k,
    p_v,
    p_places,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    table_stride,
    places_stride,
    first_seq,
    num_seqs,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """A program takes a head of a block."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    seqs = tl.arange(0, BLOCK_B)
    held = tl.load(p_context + first_seq + seqs, mask=seqs < num_seqs, other=0)
    upto = tl.cumsum(tl.cdiv(held, BLOCK_SIZE), 0)
    before = (upto <= place) & (seqs < num_seqs)
    seq = tl.sum(before.to(tl.int32), 0)
    if seq >= num_seqs:
        return
    index = place - tl.max(tl.where(before, upto, 0), 0)
    block = tl.load(p_table + (first_seq + seq).to(tl.int64) * table_stride + index).to(tl.int64)
    slot = tl.arange(0, BLOCK_SIZE)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    inside = channel < D
    target = ((place.to(tl.int64) * G + head) * BLOCK_SIZE + slot) * D + channel
    k = tl.load(p_k_cache + block * k_block_stride + head * k_head_stride + slot * k_slot_stride + channel, mask=inside)
    v = tl.load(p_v_cache + block * v_block_stride + head * v_head_stride + slot * v_slot_stride + channel, mask=inside)
    tl.store(p_k + target, k.to(p_k.dtype.element_ty), mask=inside)
    tl.store(p_v + target, v.to(p_v.dtype.element_ty), mask=inside)
    if head == 0:
        tl.store(p_places + (first_seq + seq).to(tl.int64) * places_stride + index, place)


def upcasts(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, entries: int) -> bool:
    """Whether caches of 8-bit floats are written out for queries q: where the kernel of prompts takes them then, and so
    many tokens are known to be all and there is memory for them."""
    _, g, _, d = k_cache.shape
    if k_cache.dtype != FP8 or not group_products(q.device) or q.element_size() != 2 or d not in (64, 128):
        return False
    return 0 < entries * 2 * g * d * q.element_size() <= MAX_BYTES and v_cache.shape == k_cache.shape


def upcast(
    workspace: Workspace,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    dtype: torch.dtype,
    first_seq: int,
    entries: int,
) -> UpcastCache:
    """The sequences from `first_seq` on, which have at most `entries` tokens in the caches together. What stands behind
    a sequence's last token is as in its block."""
    _, g, block_size, d = k_cache.shape
    seqs = len(context_len) - first_seq
    blocks = cdiv(entries, block_size) + seqs
    k = torch.empty(blocks, g, block_size, d, dtype=dtype, device=k_cache.device)
    v = torch.empty_like(k)
    table = torch.empty(block_table.shape, dtype=torch.int32, device=k_cache.device)
    workspace.launch(_upcast, (blocks, g))(
        k_cache,
        v_cache,
        block_table,
        context_len,
        k,
        v,
        table,
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        table.stride(0),
        first_seq,
        seqs,
        G=g,
        D=d,
        BLOCK_SIZE=block_size,
        BLOCK_D=next_power_of_2(d),
        BLOCK_B=max(SEQS, next_power_of_2(seqs)),
        num_warps=2,
    )
    return UpcastCache(k, v, table)
