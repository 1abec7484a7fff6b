"""Candidates of a part of the vocabulary in Triton, without sorting it.

As `sample` does: the first kernel gives each tile's best score and, of a sequence with candidates, each group's
maximum. The second, one program a sequence, bisects over the group maxima for the few groups that can hold a candidate,
then over those for the last logit that is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.draws import (
    CHUNK,
    COLDEST,
    GROUP,
    RUN,
    ZERO_BITS,
    best_of_tile,
    bound,
    bound_of,
    gumbel_of,
    inside,
    load_run,
    tokens_of,
)
from kernels.sample_candidates.reference import HEAD as HEAD_WORDS
from kernels.sample_candidates.reference import MAX_TOP_K as MOST
from kernels.sample_candidates.reference import WORDS as ALL_WORDS
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

HEAD = tl.constexpr(HEAD_WORDS)
MAX_TOP_K = tl.constexpr(MOST)
WORDS = tl.constexpr(ALL_WORDS)
TILE = tl.constexpr(4 * RUN.value)
GROUPS = tl.constexpr(TILE.value // GROUP.value)

_SETTINGS = ["p_rows", "p_temperature", "p_top_k", "p_seeds", "p_positions"]


@triton.jit
def _has_candidates(temperature, top_k, vocab):
    return (temperature >= COLDEST) & (top_k > 0) & (top_k <= MAX_TOP_K) & (top_k < vocab)


@triton.jit(do_not_specialize=["base", "vocab"], do_not_specialize_on_alignment=_SETTINGS)
def _tiles(
    p_logits,
    p_rows,
    p_temperature,
    p_top_k,
    p_seeds,
    p_positions,
    p_score,
    p_place,
    p_groups,
    logits_stride,
    base,
    V,
    vocab,
    LEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_seq = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    row = tl.load(p_rows + i_seq).to(tl.int64)
    temperature = tl.load(p_temperature + row)
    seed, position = tl.load(p_seeds + row), tl.load(p_positions + i_seq).to(tl.int32)
    p_seq = p_logits + i_seq * logits_stride - LEAD
    first, counter = i_tile * TILE, base // 4 + i_tile * RUN
    place, best = best_of_tile(p_seq, first, counter, seed, position, temperature, V, LEAD)
    highest = tl.max(best, axis=0)
    i_work = i_seq * tl.num_programs(1) + i_tile
    tl.store(p_score + i_work, highest)
    tl.store(p_place + i_work, tl.maximum(tl.min(tl.where(best == highest, place, V), axis=0), LEAD))
    if _has_candidates(temperature, tl.load(p_top_k + row), vocab):
        for part in tl.static_range(4):
            _, x = load_run(p_seq, first + part * RUN, V, LEAD)
            p_heads = p_groups + i_work * GROUPS + part * (RUN // GROUP) + tl.arange(0, RUN // GROUP)
            tl.store(p_heads, tl.max(tl.reshape(x, [RUN // GROUP, GROUP]), axis=1))


@triton.jit
def _smallest(p_logits, p_list, n, bound, top, V, LEAD: tl.constexpr):
    """The least of the listed logits that are at least `bound`."""
    least = tl.full([CHUNK, GROUP], 0.0, dtype=tl.float32) + top
    for start in tl.range(0, n, CHUNK):
        places, listed = tokens_of(p_list, start, n)
        held = listed & inside(places, V, LEAD)
        x = tl.load(p_logits + places, mask=held, other=float("inf")).to(tl.float32)
        least = tl.minimum(least, tl.where(held & (x >= bound), x, float("inf")))
    return tl.min(tl.reshape(least, [CHUNK * GROUP]), axis=0)


@triton.jit(do_not_specialize=["base", "vocab"], do_not_specialize_on_alignment=_SETTINGS)
def _candidates(
    p_logits,
    p_rows,
    p_temperature,
    p_top_k,
    p_seeds,
    p_positions,
    p_score,
    p_place,
    p_groups,
    p_list,
    p_words,
    logits_stride,
    base,
    V,
    vocab,
    tiles,
    LEAD: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_seq = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_seq).to(tl.int64)
    temperature = tl.load(p_temperature + row)
    top_k = tl.load(p_top_k + row)
    p_seq = p_logits + i_seq * logits_stride - LEAD
    p_mine = p_words + i_seq * WORDS
    tile = tl.arange(0, BLOCK_TILES)
    m_tile = tile < tiles
    scores = tl.load(p_score + i_seq * tiles + tile, mask=m_tile, other=float("-inf"))
    winners = tl.load(p_place + i_seq * tiles + tile, mask=m_tile, other=V)
    winner = tl.min(tl.where(scores == tl.max(scores, axis=0), winners, V), axis=0)
    value = tl.load(p_seq + winner).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    tl.store(p_mine, winner + base)
    tl.store(p_mine + 1, value.to(tl.int32, bitcast=True))

    count, ties = 0, 0
    if _has_candidates(temperature, top_k, vocab):
        group = tl.arange(0, BLOCK_GROUPS)
        groups = tiles * GROUPS
        heads = tl.load(p_groups + i_seq * groups + group, mask=group < groups, other=float("-inf"))
        top = tl.max(heads, axis=0)
        if (top < float("inf")) & (top > float("-inf")):
            # A group's maximum is one token at or above it: top_k maxima make a bound on what is a candidate.
            target = top_k.to(tl.float32)
            lowest = bound_of(heads, 1.0, target, tl.minimum(top, float("-inf")), top, ZERO_BITS)
            some = (group < groups) & (heads >= lowest)
            at = tl.cumsum(some.to(tl.int32), axis=0) - 1
            p_some = p_list + i_seq * groups
            tl.store(p_some + at, group, mask=some)
            n = tl.sum(some.to(tl.int32), axis=0)
            tl.debug_barrier()
            none = float("-inf")
            low = bound(
                p_seq, p_some, n, target, lowest, top, 1.0, none, V, IS_COUNT=True, ZERO_BITS=ZERO_BITS, LEAD=LEAD
            )
            last = _smallest(p_seq, p_some, n, low, top, V, LEAD)
            # Tokens at −∞ are no candidates, and none is at ∞.
            shared = tl.where(last > float("-inf"), last, float("inf"))

            seed, position = tl.load(p_seeds + row), tl.load(p_positions + i_seq).to(tl.int32)
            best = tl.full([CHUNK * GROUP], float("-inf"), dtype=tl.float32)
            tied = tl.full([CHUNK * GROUP], 0, dtype=tl.int32) + V
            for start in tl.range(0, n, CHUNK):
                places, listed = tokens_of(p_some, start, n)
                held = listed & inside(places, V, LEAD)
                x = tl.load(p_seq + places, mask=held, other=float("-inf")).to(tl.float32)
                score = tl.div_rn(x, temperature) + gumbel_of(seed, position, places + base)
                x = tl.reshape(x, [CHUNK * GROUP])
                score = tl.reshape(score, [CHUNK * GROUP])
                places = tl.reshape(places, [CHUNK * GROUP])
                over = (x > last).to(tl.int32)
                slot = count + tl.cumsum(over, axis=0) - over
                tl.store(p_mine + HEAD + slot, x.to(tl.int32, bitcast=True), mask=x > last)
                tl.store(p_mine + HEAD + MAX_TOP_K + slot, places + base, mask=x > last)
                count += tl.sum(over, axis=0)
                equal = x == shared
                ties += tl.sum(equal.to(tl.int32), axis=0)
                better = equal & ((score > best) | ((score == best) & (places < tied)))
                tied = tl.where(better, places, tied)
                best = tl.where(better, score, best)
            if ties > 0:
                chosen = tl.min(tl.where(best == tl.max(best, axis=0), tied, V), axis=0)
                tl.store(p_mine + HEAD + MAX_TOP_K - 1, last.to(tl.int32, bitcast=True))
                tl.store(p_mine + HEAD + 2 * MAX_TOP_K - 1, chosen + base)
    tl.store(p_mine + 2, ties)
    tl.store(p_mine + 3, 0)
    slot = tl.arange(0, MAX_TOP_K)
    unused = (slot >= count) & (slot < tl.where(ties > 0, MAX_TOP_K - 1, MAX_TOP_K))
    tl.store(p_mine + HEAD + slot, 0, mask=unused)
    tl.store(p_mine + HEAD + MAX_TOP_K + slot, -1, mask=unused)


def sample_candidates(
    workspace: Workspace,
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first: int,
    vocab: int,
) -> torch.Tensor:
    """Of the tokens first … first + C − 1 among `vocab`, for each sequence [B, 132] int32: the token that wins without
    filters, and with 0 < top_k ≤ 64 the part's top_k largest logits.

    Shapes and words as in the reference; logits' sequences may be strided. Tiles begin where those of the whole
    vocabulary do, so that each token's noise comes from the call that it shares there.
    """
    seqs, size = logits.shape
    device = logits.device
    words = torch.empty((seqs, WORDS.value), dtype=torch.int32, device=device)
    if not seqs:
        return words
    pdl = workspace.pdl
    lead = first % TILE.value
    tiles = cdiv(lead + size, TILE.value)
    groups = tiles * GROUPS.value
    score = torch.empty((seqs, tiles), dtype=torch.float32, device=device)
    place = torch.empty((seqs, tiles), dtype=torch.int32, device=device)
    group_max = torch.empty((seqs, groups), dtype=torch.float32, device=device)
    group_list = torch.empty((seqs, groups), dtype=torch.int32, device=device)
    settings = (rows, temperature, top_k, seeds, positions)
    part = (logits.stride(0), first - lead, lead + size, vocab)
    workspace.launch(_tiles, (seqs, tiles))(
        logits, *settings, score, place, group_max, *part, LEAD=lead, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    workspace.launch(_candidates, (seqs,))(
        logits,
        *settings,
        score,
        place,
        group_max,
        group_list,
        words,
        *part,
        tiles,
        LEAD=lead,
        BLOCK_TILES=next_power_of_2(tiles),
        BLOCK_GROUPS=next_power_of_2(groups),
        ZERO_BITS=ZERO_BITS[logits.dtype],
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=16,
    )
    return words
