"""All-reduce over peer memory in Triton, in one launch: one-shot and two-shot.

Ranks push: a rank writes what it sends into the others' memory, where nothing is 0 that has arrived: a number that is
zero is sent with a minus sign. Whoever reads looks until no number is 0, then writes zeros back for the call after the
next. So an exchange takes one way through the links, with no flags, and a program waits for the same program of the
others alone.

A call uses the half of the memory that the call before did not. A rank sends in the call after the next when it has
ended the next, for which it got what this one sends there: this one had ended the call, and its half is empty.

Calls are counted on the device, so that a captured graph counts on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.peers import PLACES, Peers
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Programs of a launch, and elements that one of them takes at a time where rows do not matter.
MOST = 264
_RUN = 2048


@triton.jit
def _count(p_calls, call):
    """The last program that has seen the number of calls raises it. While what others send is on its way."""
    if tl.atomic_add(p_calls + 1, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(p_calls + 1, 0)
        tl.store(p_calls, call)


@triton.jit
def _bits(x):
    return x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)


@triton.jit
def _slot(p_bases, at_rank, place, sender, slot, SIZE: tl.constexpr, x):
    """Where what `sender` sends to `at_rank` is, as pointers to the bits of numbers like x."""
    base = tl.load(p_bases + at_rank) + (place * SIZE + (sender - at_rank + SIZE) % SIZE) * slot
    kind = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    return tl.multiple_of(base.to(tl.pointer_type(kind)), 16)


@triton.jit
def _push(p_sent, at, x, held):
    """Send x, which is not 0 in any bit pattern of it."""
    bits = _bits(x)
    minus_zero = -32768 if x.dtype.primitive_bitwidth == 16 else -2147483648
    tl.store(p_sent + at, tl.where(bits == 0, minus_zero, bits).to(bits.dtype), mask=held)


@triton.jit
def _arrived(p_sent, at, held, kind: tl.constexpr):
    """What was sent, once all of it is there; its place is empty then."""
    bits = tl.load(p_sent + at, mask=held, other=1, volatile=True)
    while tl.max((bits == 0).to(tl.int32), axis=0) > 0:
        bits = tl.load(p_sent + at, mask=held, other=1, volatile=True)
    tl.store(p_sent + at, tl.zeros_like(bits), mask=held)
    return bits.to(kind, bitcast=True)


@triton.jit
def _added(p_bases, x, place, slot, at, held, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The sum of x and what the others sent, in the order of ranks, rounded as it was sent. Zero has no sign."""
    total = tl.zeros_like(x).to(tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            p_sent = _slot(p_bases, RANK, place, rank, slot, SIZE, x)
            total += _arrived(p_sent, at, held, x.dtype).to(tl.float32)
    summed = total.to(x.dtype)
    return tl.where(summed == 0.0, tl.zeros_like(summed), summed)


@triton.jit
def _beside(p_residual, p_weight, x, at, column, held, E, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr):
    """What a row's sum is added to and scaled by, loaded while the sum is waited for."""
    residual = tl.load(p_residual + at, mask=held, other=0.0) if HAS_RESIDUAL else x
    weight = tl.load(p_weight + column, mask=column < E, other=0.0) if HAS_NORM else x
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
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call = tl.load(p_calls) + 1
    place = call % 2 * PLACES
    column = tl.arange(0, BLOCK_E)
    first = tl.program_id(0).to(tl.int64)
    for row in tl.range(first, rows, tl.num_programs(0)):
        at = row * E + column
        held = (column < E) & (at < count)
        x = tl.load(p_x + at, mask=held, other=0.0)
        for to in tl.static_range(SIZE):
            if to != RANK:
                _push(_slot(p_bases, to, place, RANK, slot, SIZE, x), at, x, held)
    _count(p_calls, call)
    for row in tl.range(first, rows, tl.num_programs(0)):
        at = row * E + column
        held = (column < E) & (at < count)
        x = tl.load(p_x + at, mask=held, other=0.0)
        residual, weight = _beside(p_residual, p_weight, x, at, column, held, E, HAS_RESIDUAL, HAS_NORM)
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
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call = tl.load(p_calls) + 1
    place = call % 2 * PLACES
    column = tl.arange(0, BLOCK_E)
    first = tl.program_id(0).to(tl.int64)
    share = (rows + SIZE - 1) // SIZE
    for to in tl.static_range(SIZE):
        if to != RANK:
            for i in tl.range(first, share, tl.num_programs(0)):
                at = (to * share + i) * E + column
                held = (column < E) & (at < count)
                x = tl.load(p_x + at, mask=held, other=0.0)
                _push(_slot(p_bases, to, place, RANK, slot, SIZE, x), i * E + column, x, held)
    _count(p_calls, call)
    for i in tl.range(first, share, tl.num_programs(0)):
        at = (RANK * share + i) * E + column
        held = (column < E) & (at < count)
        x = tl.load(p_x + at, mask=held, other=0.0)
        residual, weight = _beside(p_residual, p_weight, x, at, column, held, E, HAS_RESIDUAL, HAS_NORM)
        summed = _added(p_bases, x, place, slot, i * E + column, held, RANK, SIZE)
        for to in tl.static_range(SIZE):
            if to != RANK:
                _push(_slot(p_bases, to, place + 1, RANK, slot, SIZE, x), i * E + column, summed, held)
        _finish(summed, residual, weight, p_y, p_h, at, held, E, eps, offset, HAS_RESIDUAL, HAS_NORM)
    for of in tl.static_range(SIZE):
        if of != RANK:
            for i in tl.range(first, share, tl.num_programs(0)):
                at = (of * share + i) * E + column
                held = (column < E) & (at < count)
                x = tl.load(p_x + at, mask=held, other=0.0)
                p_sent = _slot(p_bases, RANK, place + 1, of, slot, SIZE, x)
                residual, weight = _beside(p_residual, p_weight, x, at, column, held, E, HAS_RESIDUAL, HAS_NORM)
                summed = _arrived(p_sent, i * E + column, held, x.dtype)
                summed = tl.where(summed == 0.0, tl.zeros_like(summed), summed)
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
    rows, run = (tokens, width) if two_shot or norm_weight is not None else (cdiv(count, _RUN), _RUN)
    share = cdiv(rows, peers.size) if two_shot else rows
    size = min(share * run, count) * x.element_size()
    if size > peers.slot:
        raise ValueError(f"ranks would send {size} bytes each, and peers have place for {peers.slot}: take another way")
    pdl = workspace.pdl
    block = next_power_of_2(run)
    workspace.launch(_two_shot if two_shot else _one_shot, (min(share, MOST),))(
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
