"""Attention over tokens that ranks share out, put together over peer memory in Triton, in one launch: each rank sends
what it has of another's heads to that rank alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.exchange import arrived, begin_call, count_call, push, slot_of
from kernels.peers import LSE_COPIES, PLACES, Peers, partials_bytes
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

MAX_PROGRAMS = 1056
COPIES = tl.constexpr(LSE_COPIES)


@triton.jit(do_not_specialize=["tokens", "slot"])
def _merge(
    p_o,
    p_lse,
    p_out,
    p_firsts,
    p_bases,
    p_calls,
    tokens,
    slot,
    H,
    OWN,
    L,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    call, place = begin_call(p_calls, PLACES, PDL)
    of_l, copies = tl.arange(0, BLOCK_L), tl.arange(0, COPIES)
    own = tl.load(p_firsts + RANK)
    rows = tokens * H
    first = tl.program_id(0).to(tl.int64)
    for row in tl.range(first, rows, tl.num_programs(0)):
        token, head = row // H, row % H
        o = tl.load(p_o + row * L + of_l, mask=of_l < L, other=0.0)
        lse = tl.load(p_lse + row + copies * 0)
        for to in tl.static_range(SIZE):
            if to != RANK:
                begin, end = tl.load(p_firsts + to), tl.load(p_firsts + to + 1)
                its = (head >= begin) & (head < end)
                held = tl.where(its, of_l, L) < L
                p_sent = slot_of(p_bases, to, place, RANK, slot, SIZE, o.dtype)
                at = (token * (end - begin) + head - begin) * (L + COPIES)
                push(p_sent, at + of_l, o, held)
                push(p_sent, at + L + copies, lse, tl.where(its, copies, COPIES) < COPIES)
    count_call(p_calls, call)
    for row in tl.range(first, rows, tl.num_programs(0)):
        token, head = row // H, row % H
        if (head >= own) & (head < own + OWN):
            place_out = token * OWN + head - own
            top = float("-inf")
            total = 0.0
            merged = tl.zeros([BLOCK_L], tl.float32)
            for rank in tl.static_range(SIZE):
                if rank == RANK:
                    o = tl.load(p_o + row * L + of_l, mask=of_l < L, other=0.0)
                    lse = tl.load(p_lse + row)
                else:
                    p_sent = slot_of(p_bases, RANK, place, rank, slot, SIZE, tl.float32)
                    at = place_out * (L + COPIES)
                    o = arrived(p_sent, at + of_l, of_l < L, tl.float32)
                    lse = tl.max(arrived(p_sent, at + L + copies, copies >= 0, tl.float32), axis=0)
                larger = tl.maximum(top, lse)
                base = tl.where(larger == float("-inf"), 0.0, larger)
                kept, weight = tl.exp(top - base), tl.exp(lse - base)
                merged = merged * kept + tl.where(of_l < L, o, 0.0) * weight
                total = total * kept + weight
                top = larger
            merged = merged / tl.where(total == 0.0, 1.0, total)
            tl.store(p_out + place_out * L + of_l, merged.to(p_out.dtype.element_ty), mask=of_l < L)


def peer_merge(
    workspace: Workspace,
    o: torch.Tensor,
    lse: torch.Tensor,
    peers: Peers,
    firsts: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Of each head h of this rank:  Σ e^(lse_r − m) o_r / Σ e^(lse_r − m) over ranks r, with m the largest lse_r.

    As in the reference. Raises ValueError for more bytes than a slot of `peers` has place for; it looks at this rank's.
    """
    tokens, all_heads, latent = o.shape
    size = partials_bytes(tokens, heads, latent)
    if size > peers.slot:
        raise ValueError(f"a rank would be sent {size} bytes, and peers have place for {peers.slot}: take another way")
    out = o.new_empty(tokens, heads, latent, dtype=dtype)
    if not tokens:
        return out
    pdl, block = workspace.pdl, next_power_of_2(latent)
    workspace.launch(_merge, (min(tokens * all_heads, MAX_PROGRAMS),))(
        o,
        lse,
        out,
        firsts,
        peers.bases,
        peers.calls,
        tokens,
        peers.slot,
        all_heads,
        heads,
        latent,
        RANK=peers.rank,
        SIZE=peers.size,
        PLACES=PLACES,
        BLOCK_L=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(8, cdiv(block, 128))),
    )
    return out
