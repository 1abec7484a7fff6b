# mypy: disable-error-code="no-untyped-def"
"""Pairs of token and expert brought together by expert, and cut into tiles of one expert each.

Places within an expert are given out by atomic counters: which pair takes which is left open, and no result depends on
it, since a pair's row of a product does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Pairs a program counts; up to so many are ordered in one launch. A few have a program of their own size.
FEW, CHUNK = 256, 1024


@triton.jit(do_not_specialize=["pairs"])
def _count(
    experts,
    counts,
    rank,
    order,
    offsets,
    ends,
    pairs,
    num_experts,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts [E + 1] holds zeros before and after; its last entry counts programs. ends[e] is the number of tiles of
    the experts up to e."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + pair, mask=pair < pairs, other=-1)
    there = (expert >= 0) & (expert < num_experts)
    place = tl.atomic_add(counts + expert, 1, mask=there)
    if not ALONE:
        tl.store(rank + pair, place, mask=there)
    tl.debug_barrier()
    if not ALONE:
        arrived = tl.atomic_add(counts + num_experts, 1, sem="acq_rel", scope="gpu")
        if arrived < tl.num_programs(0) - 1:
            return
    e = tl.arange(0, BLOCK_E)
    live = e < num_experts
    count = tl.load(counts + e, mask=live, other=0, cache_modifier=".cg")
    upto = tl.cumsum(count, 0)
    tl.store(offsets + e + 1, upto, mask=live)
    tl.store(offsets + e, upto - count, mask=e == 0)
    tl.store(ends + e, tl.cumsum((count + ROWS - 1) // ROWS, 0), mask=live)
    tl.store(counts + e, 0, mask=e <= num_experts)
    if ALONE:
        tl.debug_barrier()
        first = tl.load(offsets + expert, mask=there, other=0, cache_modifier=".cg")
        tl.store(order + first + place, pair, mask=there)


@triton.jit(do_not_specialize=["pairs"])
def _place(experts, rank, order, offsets, pairs, num_experts, CHUNK: tl.constexpr):
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + pair, mask=pair < pairs, other=-1)
    there = (expert >= 0) & (expert < num_experts)
    first = tl.load(offsets + expert, mask=there, other=0)
    tl.store(order + first + tl.load(rank + pair, mask=there, other=0), pair, mask=there)


@lru_cache(maxsize=64)
def _counts(device: torch.device, num_experts: int) -> torch.Tensor:
    """Zeros that every launch leaves zero; made by the eager call before any capture."""
    return torch.zeros(triton.next_power_of_2(num_experts + 1), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Order:
    """Pairs by expert, `order`; expert e's are offsets[e] … offsets[e+1], its tiles of `rows` pairs end at ends[e].

    tiles bounds the number of tiles, which only the device knows.
    """

    order: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    rows: int
    tiles: int


def ordered(experts: torch.Tensor, num_experts: int, rows: int, pdl: bool) -> Order:
    """experts [T, K] int32, contiguous; pairs of experts outside of [0, num_experts) are left out. Calls on a device
    share their counters: they must run in one stream order."""
    pairs = experts.numel()
    device = experts.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    alone = pairs <= CHUNK
    chunk = FEW if pairs <= FEW else CHUNK
    rank = order if alone else torch.empty_like(order)
    _count[(triton.cdiv(pairs, chunk),)](
        experts, _counts(device, num_experts), rank, order, offsets, ends, pairs, num_experts, CHUNK=chunk, ROWS=rows,
        BLOCK_E=triton.next_power_of_2(num_experts + 1), ALONE=alone, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    if not alone:
        _place[(triton.cdiv(pairs, chunk),)](experts, rank, order, offsets, pairs, num_experts, CHUNK=chunk)
    return Order(order, offsets, ends, rows, min(pairs, triton.cdiv(pairs, rows) + num_experts))
