"""All-gather of columns over peer memory in Triton, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.exchange import MAX_PROGRAMS, RUN_LENGTH, arrived, begin_call, count_call, plain_zeros, push_all, slot_of
from kernels.peers import PLACES, Peers
from kernels.sizes import cdiv
from kernels.workspace import Workspace


@triton.jit(do_not_specialize=["tokens", "slot"])
def _gather(
    p_x,
    p_out,
    p_firsts,
    p_bases,
    p_calls,
    tokens,
    slot,
    columns,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    call, place = begin_call(p_calls, PLACES, PDL)
    kind = p_x.dtype.element_ty
    of_run = tl.arange(0, RUN)
    own = tl.load(p_firsts + RANK)
    width = tl.load(p_firsts + RANK + 1) - own
    count = tokens * width
    first = tl.program_id(0).to(tl.int64) * RUN
    step = tl.num_programs(0) * RUN
    for begin in tl.range(first, count, step):
        at = begin + of_run
        x = tl.load(p_x + at, mask=at < count, other=0.0)
        push_all(p_bases, place, slot, at, x, at < count, RANK, SIZE)
        x = plain_zeros(x)
        tl.store(p_out + at // width * columns + own + at % width, x, mask=at < count)
    count_call(p_calls, call)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            its = tl.load(p_firsts + rank)
            width = tl.load(p_firsts + rank + 1) - its
            count = tokens * width
            for begin in tl.range(first, count, step):
                at = begin + of_run
                x = arrived(slot_of(p_bases, RANK, place, rank, slot, SIZE, kind), at, at < count, kind)
                x = plain_zeros(x)
                tl.store(p_out + at // width * columns + its + at % width, x, mask=at < count)


def peer_gather(
    workspace: Workspace, x: torch.Tensor, peers: Peers, firsts: torch.Tensor, columns: int
) -> torch.Tensor:
    """x [T, C] of each rank → [T, columns], those of a rank from firsts[rank] to firsts[rank + 1].

    As in the reference. Raises ValueError for more bytes than a slot of `peers` has place for; it looks at this rank's.
    """
    if x.nbytes > peers.slot:
        raise ValueError(f"a rank would send {x.nbytes} bytes, and peers have place for {peers.slot}: take another way")
    out = x.new_empty(len(x), columns)
    if not out.numel():
        return out
    pdl = workspace.pdl
    # As many on all ranks, whose columns may be fewer.
    runs = cdiv(len(x) * cdiv(columns, peers.size), RUN_LENGTH)
    workspace.launch(_gather, (min(max(1, runs), MAX_PROGRAMS),))(
        x,
        out,
        firsts,
        peers.bases,
        peers.calls,
        len(x),
        peers.slot,
        columns,
        RANK=peers.rank,
        SIZE=peers.size,
        PLACES=PLACES,
        RUN=RUN_LENGTH,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )
    return out
