"""All-reduce over peer memory in Triton, in one launch: one-shot and two-shot.

A rank writes its rows into its own piece, raises a flag on every rank, waits until all have raised theirs, and reads.
Raising is a release and waiting an acquire at system scope, behind and before a barrier of the program: what any thread
of a program wrote before it raised the flag, every thread of the program that waited sees. Program p of a rank waits
for programs p of the others alone.

Calls are counted on the device, so that a captured graph counts on. A call uses the half of the pieces that the call
before did not: when all flags of a call are up, every rank has ended the call before it, and its half is free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.peers import MAX_PROGRAMS as MOST
from kernels.peers import Peers, flag_bytes
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

MAX_PROGRAMS = tl.constexpr(MOST)
# Elements of a program's piece where rows do not matter.
_RUN = 2048


@triton.jit
def _raise(p_bases, stage, call, rank, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Say to every rank that this program has come to `stage` of the call, and that all it wrote is there."""
    tl.debug_barrier()
    to = tl.arange(0, BLOCK_SIZE)
    p_flags = tl.load(p_bases + to, mask=to < SIZE, other=0).to(tl.pointer_type(tl.int64))
    place = (stage * MAX_PROGRAMS + tl.program_id(0)) * SIZE + rank
    said = tl.zeros([BLOCK_SIZE], dtype=tl.int64) + call
    tl.atomic_xchg(p_flags + place, said, mask=to < SIZE, sem="release", scope="sys")


@triton.jit
def _wait(p_own, stage, call, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Until all ranks have come to `stage` of the call."""
    of = tl.arange(0, BLOCK_SIZE)
    p_flags = p_own.to(tl.pointer_type(tl.int64)) + (stage * MAX_PROGRAMS + tl.program_id(0)) * SIZE + of
    none = tl.zeros([BLOCK_SIZE], dtype=tl.int64)
    # A number, and no tensor: Triton 3.6 does not compile a while loop that carries one.
    least = call - 1
    while least < call:
        last = tl.atomic_add(p_flags, none, mask=of < SIZE, sem="acquire", scope="sys")
        least = tl.min(tl.where(of < SIZE, last, call), axis=0)
    tl.debug_barrier()


@triton.jit
def _end(p_calls, call):
    """The last program of a call counts it."""
    if tl.atomic_add(p_calls + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(p_calls + 1, 0)
        tl.store(p_calls, call)


@triton.jit
def _at(base, place, kind):
    """A place in a piece, where 16 bytes go at once."""
    return tl.multiple_of((base + place).to(kind), 16)


@triton.jit
def _added(p_bases, kind, place, at, held, SIZE: tl.constexpr, BLOCK_E: tl.constexpr):
    """The sum of what all ranks sent, in their order, rounded as it was sent."""
    total = tl.zeros([BLOCK_E], dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        p_sent = _at(tl.load(p_bases + rank), place, kind)
        total += tl.load(p_sent + at, mask=held, other=0.0).to(tl.float32)
    return total.to(kind.element_ty)


@triton.jit
def _finish(
    summed,
    p_residual,
    p_weight,
    p_y,
    p_h,
    at,
    column,
    held,
    E,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Add the residual to a row's sum, and norm it."""
    h = summed
    if HAS_RESIDUAL:
        residual = tl.load(p_residual + at, mask=held, other=0.0)
        h = (summed.to(tl.float32) + residual.to(tl.float32)).to(summed.dtype)
    tl.store(p_h + at, h, mask=held)
    if HAS_NORM:
        f = h.to(tl.float32)
        weight = tl.load(p_weight + column, mask=column < E, other=0.0).to(tl.float32)
        mean = tl.sum(tl.where(held, f * f, 0.0), axis=0) / E
        tl.store(p_y + at, (f * tl.rsqrt(mean + eps) * (weight + offset)).to(h.dtype), mask=held)


@triton.jit(do_not_specialize=["rows", "half", "sent"])
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
    half,
    sent,
    E,
    eps,
    offset,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call = tl.load(p_calls) + 1
    place = FLAG_BYTES + call % 2 * half
    own = tl.load(p_bases + RANK)
    kind = p_x.dtype
    p_sent = _at(own, place, kind)
    column = tl.arange(0, BLOCK_E)
    first = tl.program_id(0).to(tl.int64)
    for row in tl.range(first, rows, tl.num_programs(0)):
        at = row * E + column
        held = (column < E) & (at < count)
        tl.store(p_sent + at, tl.load(p_x + at, mask=held, other=0.0), mask=held)
    _raise(p_bases, 0, call, RANK, SIZE, BLOCK_SIZE)
    _wait(own, 0, call, SIZE, BLOCK_SIZE)
    for row in tl.range(first, rows, tl.num_programs(0)):
        at = row * E + column
        held = (column < E) & (at < count)
        summed = _added(p_bases, kind, place, at, held, SIZE, BLOCK_E)
        _finish(summed, p_residual, p_weight, p_y, p_h, at, column, held, E, eps, offset, HAS_RESIDUAL, HAS_NORM)
    _end(p_calls, call)


@triton.jit(do_not_specialize=["rows", "half", "sent"])
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
    half,
    sent,
    E,
    eps,
    offset,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call = tl.load(p_calls) + 1
    place = FLAG_BYTES + call % 2 * half
    own = tl.load(p_bases + RANK)
    kind = p_x.dtype
    p_sent = _at(own, place, kind)
    column = tl.arange(0, BLOCK_E)
    first = tl.program_id(0).to(tl.int64)
    split = (rows + SIZE - 1) // SIZE
    for of in tl.static_range(SIZE):
        for i in tl.range(first, split, tl.num_programs(0)):
            at = (of * split + i) * E + column
            held = (column < E) & (at < count)
            tl.store(p_sent + at, tl.load(p_x + at, mask=held, other=0.0), mask=held)
    _raise(p_bases, 0, call, RANK, SIZE, BLOCK_SIZE)
    _wait(own, 0, call, SIZE, BLOCK_SIZE)
    for i in tl.range(first, split, tl.num_programs(0)):
        at = (RANK * split + i) * E + column
        held = (column < E) & (at < count)
        summed = _added(p_bases, kind, place, at, held, SIZE, BLOCK_E)
        for to in tl.static_range(SIZE):
            p_given = _at(tl.load(p_bases + to), place + sent, kind)
            tl.store(p_given + at, summed, mask=held)
    _raise(p_bases, 1, call, RANK, SIZE, BLOCK_SIZE)
    _wait(own, 1, call, SIZE, BLOCK_SIZE)
    p_given = _at(own, place + sent, kind)
    for of in tl.static_range(SIZE):
        for i in tl.range(first, split, tl.num_programs(0)):
            at = (of * split + i) * E + column
            held = (column < E) & (at < count)
            summed = tl.load(p_given + at, mask=held, other=0.0)
            _finish(summed, p_residual, p_weight, p_y, p_h, at, column, held, E, eps, offset, HAS_RESIDUAL, HAS_NORM)
    _end(p_calls, call)


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

    Shapes and rounding as in the reference. A program takes whole rows where there is a norm, else runs of 2,048
    elements. One launch waits for the other ranks' for as long as they take. Raises ValueError for more bytes than
    peers.capacity.
    """
    tokens, width = x.shape
    count, size = x.numel(), x.numel() * x.element_size()
    if size > peers.capacity:
        raise ValueError(f"a sum of {size} bytes was asked for, and peers hold {peers.capacity}: take another way")
    h = torch.empty_like(x)
    y = h if norm_weight is None else torch.empty_like(x)
    if not count:
        return y, h
    rows, run = (cdiv(count, _RUN), _RUN) if norm_weight is None else (tokens, width)
    split = cdiv(rows, peers.size) if two_shot else rows
    pdl = workspace.pdl
    block = next_power_of_2(run)
    workspace.launch(_two_shot if two_shot else _one_shot, (min(split, MOST),))(
        x,
        residual,
        norm_weight,
        y,
        h,
        peers.bases,
        peers.calls,
        rows,
        count,
        peers.half,
        peers.capacity,
        run,
        eps,
        offset,
        RANK=peers.rank,
        SIZE=peers.size,
        BLOCK_SIZE=next_power_of_2(peers.size),
        FLAG_BYTES=flag_bytes(peers.size),
        BLOCK_E=block,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm_weight is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, block // 256)),
    )
    return y, h
