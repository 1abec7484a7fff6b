# mypy: disable-error-code="no-untyped-def"
"""Pairs of token and expert brought together by expert, and cut into tiles of one expert each.

Places within an expert are given out by atomic counters: which pair takes which is left open, and no result depends on
it, since a pair's row of a product does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Pairs a program counts; up to so many are ordered in one launch. A few have a program of their own size.
FEW, CHUNK = 256, 1024


@triton.jit
def add_up(
    counts,
    offsets,
    ends,
    num_experts,
    tokens,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SHARED: tl.constexpr,
    APART: tl.constexpr,
):
    """Where each expert's pairs begin and its tiles of ROWS end, by the counters, which are left zero. The last SHARED
    experts have no counters, and as many pairs as there are tokens."""
    e = tl.arange(0, BLOCK_E)
    live = e < num_experts
    count = tl.load(counts + e * APART, mask=e < num_experts - SHARED, other=0, cache_modifier=".cg")
    if SHARED > 0:
        count = tl.where(live & (e >= num_experts - SHARED), tokens, count)
    upto = tl.cumsum(count, 0)
    tl.store(offsets + e + 1, upto, mask=live)
    tl.store(offsets + e, upto - count, mask=e == 0)
    tl.store(ends + e, tl.cumsum((count + ROWS - 1) // ROWS, 0), mask=live)
    tl.store(counts + e * APART, 0, mask=e <= num_experts)


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
    add_up(counts, offsets, ends, num_experts, 0, ROWS, BLOCK_E, 0, 1)
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


@triton.jit(do_not_specialize=["pairs"])
def _place_in_tiles(
    experts,
    rank,
    offsets,
    ends,
    rows,
    tokens,
    tile_expert,
    tile_pairs,
    turns,
    pairs,
    num_experts,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A pair's row stands in one of its expert's tiles; the tile's first pair writes down what the tile is."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) == 0:
        tl.store(turns + tl.arange(0, 2), 0)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + pair, mask=pair < pairs, other=-1)
    there = (expert >= 0) & (expert < num_experts)
    place = tl.load(rank + pair, mask=there, other=0)
    count = tl.load(offsets + expert + 1, mask=there, other=0) - tl.load(offsets + expert, mask=there, other=0)
    tile = tl.load(ends + expert, mask=there, other=0) - (count + ROWS - 1) // ROWS + place // ROWS
    row = tile * ROWS + place % ROWS
    tl.store(rows + pair, tl.where(there, row, -1), mask=pair < pairs)
    tl.store(tokens + row, pair // K, mask=there)
    leads = there & (place % ROWS == 0)
    tl.store(tile_expert + tile, expert, mask=leads)
    tl.store(tile_pairs + tile, tl.minimum(count - place, ROWS), mask=leads)


def counters(workspace: Workspace, num_experts: int, apart: int) -> torch.Tensor:
    """Zeros that every launch leaves zero, one for each expert and one for arrivals, `apart` places apart."""
    return workspace.counters("pairs of experts", next_power_of_2(num_experts + 1) * apart)


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


@dataclass(frozen=True, slots=True)
class Lists:
    """A list of its pairs for each expert, in any order: expert e's are the first counts[e] of pairs[e], in tiles of
    `rows`. The last `shared` experts are chosen by every token: their tiles, `parts` of each, come first. Then comes
    the first tile of every other expert, in order; behind those stand all others, by expert.

    tiles bounds the number of tiles, which only the device knows.
    """

    pairs: torch.Tensor
    counts: torch.Tensor
    rows: int
    tiles: int
    shared: int
    parts: int


@dataclass(frozen=True, slots=True)
class Places:
    """Pairs by expert in whole tiles, all int32: a pair's row (−1: its expert is none of these), the token of a row,
    the expert of a tile and its number of pairs; expert e's tiles end at ends[e]. turns [2]: zeros, from which the
    programs of two products take their tiles.

    What lies behind the last tile, or behind a tile's pairs, is arbitrary. tiles bounds the number of tiles, which only
    the device knows.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    tile_expert: torch.Tensor
    tile_pairs: torch.Tensor
    ends: torch.Tensor
    turns: torch.Tensor
    tiles: int


def ordered(workspace: Workspace, experts: torch.Tensor, num_experts: int, rows: int) -> Order:
    """experts [T, K] int32, contiguous; pairs of experts outside of [0, num_experts) are left out. Calls on a device
    share their counters: they must run in one stream order."""
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    rank, offsets, ends = _counted(workspace, experts, num_experts, rows, order if pairs <= CHUNK else None)
    if pairs > CHUNK:
        workspace.launch(_place, (cdiv(pairs, CHUNK),))(experts, rank, order, offsets, pairs, num_experts, CHUNK=CHUNK)
    return Order(order, offsets, ends, rows, _most_tiles(pairs, num_experts, rows))


def placed(workspace: Workspace, experts: torch.Tensor, num_experts: int, rows: int) -> Places:
    """As `ordered`, with `rows` rows for each tile."""
    return in_tiles(workspace, experts, *_counted(workspace, experts, num_experts, rows, None), rows)


def in_tiles(
    workspace: Workspace,
    experts: torch.Tensor,
    rank: torch.Tensor,
    offsets: torch.Tensor,
    ends: torch.Tensor,
    rows: int,
) -> Places:
    """The places of pairs whose place within their expert, its first pair and the end of its tiles are known."""
    pairs, k = experts.numel(), experts.shape[1]
    tiles = _most_tiles(pairs, len(ends), rows)
    sizes = pairs, tiles * rows, tiles, tiles, 2
    row, token, tile_expert, tile_pairs, turns = (experts.new_empty(size) for size in sizes)
    workspace.launch(_place_in_tiles, (cdiv(pairs, CHUNK),))(
        experts, rank, offsets, ends, row, token, tile_expert, tile_pairs, turns, pairs, len(ends),
        K=k, CHUNK=CHUNK, ROWS=rows, PDL=workspace.pdl, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return Places(row, token, tile_expert, tile_pairs, ends, turns, tiles)


def _most_tiles(pairs: int, num_experts: int, rows: int) -> int:
    return min(pairs, cdiv(pairs, rows) + num_experts)


def _counted(
    workspace: Workspace, experts: torch.Tensor, num_experts: int, rows: int, order: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pair's place among those of its expert, where each expert's begin, and where its tiles end. Writes the order as
    well where it is given, for up to CHUNK pairs."""
    pairs, device = experts.numel(), experts.device
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    rank = torch.empty(pairs, dtype=torch.int32, device=device) if order is None else order
    chunk = FEW if pairs <= FEW else CHUNK
    workspace.launch(_count, (cdiv(pairs, chunk),))(
        experts, counters(workspace, num_experts, 1), rank, rank, offsets, ends, pairs, num_experts, CHUNK=chunk,
        ROWS=rows, BLOCK_E=next_power_of_2(num_experts + 1), ALONE=order is not None, PDL=workspace.pdl,
        launch_pdl=workspace.pdl, num_warps=4,
    )  # fmt: skip
    return rank, offsets, ends
