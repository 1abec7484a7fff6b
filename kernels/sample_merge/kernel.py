"""The draw from candidates of the parts of a vocabulary in one Triton kernel, a program a sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.draws import COLDEST, bound_of, gumbel_of
from kernels.sample_candidates.reference import HEAD as HEAD_WORDS
from kernels.sample_candidates.reference import MAX_TOP_K as MOST
from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace

HEAD = tl.constexpr(HEAD_WORDS)
MAX_TOP_K = tl.constexpr(MOST)

_SETTINGS = ["p_rows", "p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_positions"]


@triton.jit(do_not_specialize=["seqs", "vocab"], do_not_specialize_on_alignment=_SETTINGS)
def _merge(
    p_words,
    p_rows,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_seeds,
    p_positions,
    p_tokens,
    seqs,
    parts,
    vocab,
    WORDS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_seq = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_seq).to(tl.int64)
    temperature = tl.load(p_temperature + row)
    seed, position = tl.load(p_seeds + row), tl.load(p_positions + i_seq).to(tl.int32)
    part = tl.arange(0, BLOCK_PARTS)
    p_part = p_words + (part.to(tl.int64) * seqs + i_seq) * WORDS
    ids = tl.load(p_part, mask=part < parts, other=0)
    value = tl.load(p_part + 1, mask=part < parts, other=0).to(tl.float32, bitcast=True)
    score = tl.where(part < parts, value, float("-inf"))
    if temperature >= COLDEST:
        score = tl.where(part < parts, tl.div_rn(value, temperature) + gumbel_of(seed, position, ids), float("-inf"))
    # Of equal scores the first part's is that of the lowest id.
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, part, BLOCK_PARTS), axis=0)
    token = tl.sum(tl.where(part == winner, ids, 0), axis=0)
    won = tl.max(tl.where(part == winner, value, float("-inf")), axis=0)
    if (won == float("inf")) | (won == float("-inf")):
        tl.store(p_tokens + i_seq, -1)
        return
    top_k = tl.load(p_top_k + row)
    if (temperature < COLDEST) | (top_k <= 0) | (top_k > MAX_TOP_K) | (top_k >= vocab):
        tl.store(p_tokens + i_seq, token.to(tl.int64))
        return

    i = tl.arange(0, BLOCK_PARTS * MAX_TOP_K)
    part, slot = i // MAX_TOP_K, i % MAX_TOP_K
    p_part = p_words + (part.to(tl.int64) * seqs + i_seq) * WORDS
    ids = tl.load(p_part + HEAD + MAX_TOP_K + slot, mask=part < parts, other=-1)
    x = tl.load(p_part + HEAD + slot, mask=part < parts, other=0).to(tl.float32, bitcast=True)
    ties = tl.load(p_part + 2, mask=(part < parts) & (slot == MAX_TOP_K - 1), other=1)
    x = tl.where(ids >= 0, x, float("-inf"))
    count = tl.where(ids >= 0, ties, 0).to(tl.float32)
    top = tl.max(x, axis=0)
    none = tl.minimum(top, float("-inf"))
    low = bound_of(x, count, top_k.to(tl.float32), none, top, 0)
    scaled = tl.div_rn(x - top, temperature)
    min_p, top_p = tl.load(p_min_p + row), tl.load(p_top_p + row)
    log_min_p = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
    kept = (ids >= 0) & (x >= low) & (scaled >= log_min_p)
    if top_p < 1.0:
        weights = tl.where(kept, tl.exp(scaled) * count, 0.0)
        low = bound_of(x, weights, top_p * tl.sum(weights, axis=0), low, top, 0)
    score = tl.div_rn(x, temperature) + gumbel_of(seed, position, tl.maximum(ids, 0))
    score = tl.where(kept & (x >= low), score, float("-inf"))
    drawn = tl.min(tl.where(score == tl.max(score, axis=0), ids, vocab), axis=0)
    tl.store(p_tokens + i_seq, drawn.to(tl.int64))


def sample_merge(
    workspace: Workspace,
    words: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """The token that `sample` draws from the logits of all parts, from words [N, B, 132] int32 of N parts in turn.

    Shapes as in the reference. Probabilities are added up in another order than by `sample`'s kernel: a token on the
    very edge of top_p may fall to the other side. Logits and noise are the same bits.
    """
    parts, seqs, size = words.shape
    tokens = torch.empty(seqs, dtype=torch.int64, device=words.device)
    if not seqs:
        return tokens
    pdl = workspace.pdl
    settings = (rows, temperature, top_k, top_p, min_p, seeds, positions)
    workspace.launch(_merge, (seqs,))(
        words,
        *settings,
        tokens,
        seqs,
        parts,
        vocab,
        WORDS=size,
        BLOCK_PARTS=next_power_of_2(parts),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return tokens
