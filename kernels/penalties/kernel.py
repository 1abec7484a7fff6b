# mypy: disable-error-code="no-untyped-def"
"""Repetition, presence and frequency penalties in Triton (repetition: Keskar et al. 2019, arXiv:1909.05858)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096
_CHUNK = 1024


@triton.jit
def _penalise(
    p_logits,
    p_table,
    p_rows,
    p_num_prompt,
    p_lengths,
    p_repetition,
    p_presence,
    p_frequency,
    logits_stride,
    table_stride,
    V,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_line = tl.program_id(0).to(tl.int64)
    repetition = tl.load(p_repetition + i_line)
    presence = tl.load(p_presence + i_line)
    frequency = tl.load(p_frequency + i_line)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    first = tl.program_id(1) * TILE
    num_prompt = tl.load(p_num_prompt + i_line).to(tl.int32)
    length = tl.load(p_lengths + i_line).to(tl.int32)
    p_line = p_table + tl.load(p_rows + i_line).to(tl.int64) * table_stride

    # Two histograms in one: bins [0, TILE) count the prompt's tokens, [TILE, 2·TILE) the output's.
    bins = tl.zeros([2 * TILE], dtype=tl.int32)
    for start in tl.range(0, length, CHUNK):
        place = start + tl.arange(0, CHUNK)
        token = tl.load(p_line + place, mask=place < length, other=-1) - first
        here = (token >= 0) & (token < TILE)
        bins += tl.histogram(tl.where(place < num_prompt, token, token + TILE), 2 * TILE, mask=here)
    prompt, count = tl.split(tl.trans(tl.reshape(bins, [2, TILE])))

    ids = first + tl.arange(0, TILE)
    p_mine = p_logits + i_line * logits_stride + ids
    x = tl.load(p_mine, mask=ids < V, other=0.0)
    f = x.to(tl.float32)
    f = tl.where(prompt + count > 0, tl.where(f > 0.0, tl.div_rn(f, repetition), f * repetition), f)
    f = f - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    tl.store(p_mine, f.to(x.dtype), mask=ids < V)


def penalties(
    logits: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    num_prompt: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """For a token with c occurrences in the output, and seen if it occurs in prompt or output:

        x' = x / repetition if x > 0 else x · repetition    when seen
        x″ = x' − frequency · c − presence · (c > 0)

    A program owns 4096 tokens of the vocabulary and counts those among the line's tokens, so nothing is kept between
    steps. Lines with neutral penalties are left unread. Shapes as in the reference; rows of logits and of the table
    may be strided.
    """
    lines, vocab = logits.shape
    if lines:
        _penalise[(lines, triton.cdiv(vocab, _TILE))](
            logits,
            token_table,
            rows,
            num_prompt,
            lengths,
            repetition,
            presence,
            frequency,
            logits.stride(0),
            token_table.stride(0),
            vocab,
            TILE=_TILE,
            CHUNK=_CHUNK,
            num_warps=8,
        )
