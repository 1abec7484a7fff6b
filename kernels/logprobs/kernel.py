"""Log-probabilities and top-k in Triton, without sorting the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.logprobs.reference import MAX_K
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

_TILE = 4096

# Below the ordinal of −∞: a token that is out of the race.
TAKEN = tl.constexpr(-(2**31))


@triton.jit
def _ordinal(x):
    """int32 that orders as the float32 does."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(ordinal):
    return (ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["p_sum", "p_ids"])
def _tiles(
    p_logits,
    p_tokens,
    p_max,
    p_sum,
    p_rank,
    p_ordinals,
    p_ids,
    logits_stride,
    tiles,
    V,
    K: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    i_work = i_row * tiles + i_tile
    p_row = p_logits + i_row * logits_stride
    chosen = tl.load(p_tokens + i_row)
    value = tl.load(p_row + chosen).to(tl.float32)
    ids = i_tile * TILE + tl.arange(0, TILE)
    inside = ids < V
    x = tl.load(p_row + ids, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    weight = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
    ahead = inside & ((x > value) | ((x == value) & (ids < chosen)))
    tl.store(p_max + i_work, top)
    tl.store(p_sum + i_work, tl.sum(weight, axis=0))
    tl.store(p_rank + i_work, tl.sum(ahead.to(tl.int32), axis=0))
    ordinals = tl.where(inside, _ordinal(x), TAKEN)
    for place in tl.range(0, K):
        best = tl.max(ordinals, axis=0)
        found = tl.min(tl.where(ordinals == best, ids, V), axis=0)
        tl.store(p_ordinals + i_work * K + place, best)
        tl.store(p_ids + i_work * K + place, found)
        ordinals = tl.where(ids == found, TAKEN, ordinals)


@triton.jit(do_not_specialize_on_alignment=["p_sum", "p_ids"])
def _merge(
    p_logits,
    p_tokens,
    p_max,
    p_sum,
    p_rank,
    p_ordinals,
    p_ids,
    p_out_ids,
    p_out_logprobs,
    p_out_ranks,
    logits_stride,
    tiles,
    V,
    K: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_CANDIDATES: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_TILES)
    m_tile = tile < tiles
    maxima = tl.load(p_max + i_row * tiles + tile, mask=m_tile, other=float("-inf"))
    sums = tl.load(p_sum + i_row * tiles + tile, mask=m_tile, other=0.0)
    ranks = tl.load(p_rank + i_row * tiles + tile, mask=m_tile, other=0)
    top = tl.max(maxima, axis=0)
    total = top + tl.log(tl.sum(tl.where(sums > 0.0, sums * tl.exp(maxima - top), 0.0), axis=0))
    chosen = tl.load(p_tokens + i_row)
    value = tl.load(p_logits + i_row * logits_stride + chosen).to(tl.float32)
    p_id = p_out_ids + i_row * (K + 1)
    p_logprob = p_out_logprobs + i_row * (K + 1)
    p_place = p_out_ranks + i_row * (K + 1)
    tl.store(p_id, chosen)
    tl.store(p_logprob, value - total)
    tl.store(p_place, tl.sum(ranks, axis=0).to(tl.int64) + 1)
    candidate = tl.arange(0, BLOCK_CANDIDATES)
    m_candidate = candidate < tiles * K
    ordinals = tl.load(p_ordinals + i_row * tiles * K + candidate, mask=m_candidate, other=TAKEN)
    ids = tl.load(p_ids + i_row * tiles * K + candidate, mask=m_candidate, other=V)
    for place in tl.range(0, K):
        best = tl.max(ordinals, axis=0)
        found = tl.min(tl.where(ordinals == best, ids, V), axis=0)
        tl.store(p_id + place + 1, found.to(tl.int64))
        tl.store(p_logprob + place + 1, _value(best) - total)
        tl.store(p_place + place + 1, place + 1)
        ordinals = tl.where(ids == found, TAKEN, ordinals)


def logprobs(
    workspace: Workspace, logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log p(t) = x_t − log Σ exp(x), in float32; tokens rank by descending logit, then by ascending id.

    A program takes 4096 tokens and draws its k largest in turn; a second kernel merges the tiles of a row. Shapes as
    in the reference; logits' rows may be strided. Raises ValueError for k outside 0 … min(V, 64).
    """
    rows, vocab = logits.shape
    if not 0 <= k <= min(MAX_K, vocab):
        raise ValueError(f"logprobs of the {k} likeliest tokens were asked for: use 0 to {min(MAX_K, vocab)}")
    device = logits.device
    ids = torch.empty((rows, k + 1), dtype=torch.int64, device=device)
    values = torch.empty((rows, k + 1), dtype=torch.float32, device=device)
    ranks = torch.empty((rows, k + 1), dtype=torch.int64, device=device)
    if not rows:
        return ids, values, ranks
    tiles = cdiv(vocab, _TILE)
    tile_max, tile_sum = torch.empty((2, rows, tiles), dtype=torch.float32, device=device).unbind()
    tile_rank = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    tile_ordinals, tile_ids = torch.empty((2, rows, tiles, max(k, 1)), dtype=torch.int32, device=device).unbind()
    found = (tile_max, tile_sum, tile_rank, tile_ordinals, tile_ids)
    workspace.launch(_tiles, (rows, tiles))(
        logits, tokens, *found, logits.stride(0), tiles, vocab, K=k, TILE=_TILE, num_warps=4
    )
    workspace.launch(_merge, (rows,))(
        logits,
        tokens,
        *found,
        ids,
        values,
        ranks,
        logits.stride(0),
        tiles,
        vocab,
        K=k,
        BLOCK_TILES=next_power_of_2(tiles),
        BLOCK_CANDIDATES=next_power_of_2(max(tiles * k, 1)),
        num_warps=4,
    )
    return ids, values, ranks
