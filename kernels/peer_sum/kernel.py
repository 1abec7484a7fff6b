"""All-reduce over peer memory in Triton, in one launch: one-shot and two-shot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.exchange import (
    MAX_PROGRAMS,
    RUN_LENGTH,
    arrived,
    begin_call,
    count_call,
    plain_zeros,
    push,
    push_all,
    slot_of,
)
from kernels.peers import PLACES, Peers
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace


@triton.jit
def _row_of(row, column, E, count):
    """Where a row's elements are, and which of them there are."""
    at = row * E + column
    return at, (column < E) & (at < count)


@triton.jit
def _added(p_bases, x, place, slot, at, held, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The sum of x and what the others sent, in the order of ranks, rounded as it was sent. Zero has no sign."""
    total = tl.zeros_like(x).to(tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            p_sent = slot_of(p_bases, RANK, place, rank, slot, SIZE, x.dtype)
            total += arrived(p_sent, at, held, x.dtype).to(tl.float32)
    return plain_zeros(total.to(x.dtype))


@triton.jit
def _beside(p_residual, p_weight, at, column, held, E, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr):
    """What a row's sum is added to and scaled by, loaded while the sum is waited for; `at` where there is none."""
    residual = tl.load(p_residual + at, mask=held, other=0.0) if HAS_RESIDUAL else at
    weight = tl.load(p_weight + column, mask=column < E, other=0.0) if HAS_NORM else at
    return residual, weight


@triton.jit
def _finish(
    summed, residual, weight, p_y, p_h, at, held, E, eps, offset, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Add the residual to a row's sum, and norm it."""
    h = summed
    if HAS_RESIDUAL:
        h = (summed.to(tl.float32) + residual.to(tl.float32)).to(summed.dtype)
    tl.store(p_h + at, h, mask=held)
    if HAS_NORM:
        f = h.to(tl.float32)
        mean = tl.sum(tl.where(held, f * f, 0.0), axis=0) / E
        scaled = f * tl.rsqrt(mean + eps) * (weight.to(tl.float32) + offset)
        tl.store(p_y + at, scaled.to(h.dtype), mask=held)


@triton.jit(do_not_specialize=["rows", "slot"])
def _one_shot(
    p_x,
    p_residual,
    p_weight,
    p_y,
    p_h,
    p_bases,
    p_calls,
    rows,
    count,
    slot,
    E,
    eps,
    offset,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    call, place = begin_call(p_calls, PLACES, PDL)
    column = tl.arange(0, BLOCK_E)
    first = tl.program_id(0).to(tl.int64)
    for row in tl.range(first, rows, tl.num_programs(0)):
        at, held = _row_of(row, column, E, count)
        x = tl.load(p_x + at, mask=held, other=0.0)
        push_all(p_bases, place, slot, at, x, held, RANK, SIZE)
    count_call(p_calls, call)
    for row in tl.range(first, rows, tl.num_programs(0)):
        at, held = _row_of(row, column, E, count)
        x = tl.load(p_x + at, mask=held, other=0.0)
        residual, weight = _beside(p_residual, p_weight, at, column, held, E, HAS_RESIDUAL, HAS_NORM)
        summed = _added(p_bases, x, place, slot, at, held, RANK, SIZE)
        _finish(summed, residual, weight, p_y, p_h, at, held, E, eps, offset, HAS_RESIDUAL, HAS_NORM)


@triton.jit(do_not_specialize=["rows", "slot"])
def _two_shot(
    p_x,
    p_residual,
    p_weight,
    p_y,
    p_h,
    p_bases,
    p_calls,
    rows,
    count,
    slot,
    E,
    eps,
    offset,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    call, place = begin_call(p_calls, PLACES, PDL)
    kind = p_x.dtype.element_ty
    column = tl.arange(0, BLOCK_E)
    first = tl.program_id(0).to(tl.int64)
    split = (rows + SIZE - 1) // SIZE
    for to in tl.static_range(SIZE):
        if to != RANK:
            for i in tl.range(first, split, tl.num_programs(0)):
                at, held = _row_of(to * split + i, column, E, count)
                x = tl.load(p_x + at, mask=held, other=0.0)
                push(slot_of(p_bases, to, place, RANK, slot, SIZE, kind), i * E + column, x, held)
    count_call(p_calls, call)
    for i in tl.range(first, split, tl.num_programs(0)):
        at, held = _row_of(RANK * split + i, column, E, count)
        x = tl.load(p_x + at, mask=held, other=0.0)
        residual, weight = _beside(p_residual, p_weight, at, column, held, E, HAS_RESIDUAL, HAS_NORM)
        summed = _added(p_bases, x, place, slot, i * E + column, held, RANK, SIZE)
        push_all(p_bases, place + 1, slot, i * E + column, summed, held, RANK, SIZE)
        _finish(summed, residual, weight, p_y, p_h, at, held, E, eps, offset, HAS_RESIDUAL, HAS_NORM)
    for of in tl.static_range(SIZE):
        if of != RANK:
            for i in tl.range(first, split, tl.num_programs(0)):
                at, held = _row_of(of * split + i, column, E, count)
                p_sent = slot_of(p_bases, RANK, place + 1, of, slot, SIZE, kind)
                residual, weight = _beside(p_residual, p_weight, at, column, held, E, HAS_RESIDUAL, HAS_NORM)
                summed = plain_zeros(arrived(p_sent, i * E + column, held, kind))
                _finish(summed, residual, weight, p_y, p_h, at, held, E, eps, offset, HAS_RESIDUAL, HAS_NORM)


def peer_sum(
    workspace: Workspace,
    x: torch.Tensor,
    peers: Peers,
    two_shot: bool = False,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = residual + Σ x over ranks;  y = h / sqrt(mean(h²) + eps) * (norm_weight + offset), or h without norm_weight.

    Shapes and rounding as in the reference. A program takes whole rows, or runs of 2,048 elements of a one-shot sum
    without a norm. One launch waits for the other ranks' for as long as they take. Raises ValueError for more
    bytes than a slot of `peers` has place for.
    """
    tokens, width = x.shape
    count = x.numel()
    h = torch.empty_like(x)
    y = h if norm_weight is None else torch.empty_like(x)
    if not count:
        return y, h
    by_rows = two_shot or norm_weight is not None
    rows, run = (tokens, width) if by_rows else (cdiv(count, RUN_LENGTH), RUN_LENGTH)
    split = cdiv(rows, peers.size) if two_shot else rows
    size = min(split * run, count) * x.element_size()
    if size > peers.slot:
        raise ValueError(f"ranks would send {size} bytes each, and peers have place for {peers.slot}: take another way")
    pdl = workspace.pdl
    block = next_power_of_2(run)
    workspace.launch(_two_shot if two_shot else _one_shot, (min(split, MAX_PROGRAMS),))(
        x,
        residual,
        norm_weight,
        y,
        h,
        peers.bases,
        peers.calls,
        rows,
        count,
        peers.slot,
        run,
        eps,
        offset,
        RANK=peers.rank,
        SIZE=peers.size,
        PLACES=PLACES,
        BLOCK_E=block,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm_weight is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, block // 256)),
    )
    return y, h
