"""Repetition, presence and frequency penalties in Triton (repetition: Keskar et al. 2019, arXiv:1909.05858)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sizes import cdiv
from kernels.workspace import Workspace

_CHUNK = 1024

# A bit above any count of output tokens: the prompt holds the token.
PROMPT = tl.constexpr(1 << 30)


@triton.jit
def _tokens(
    p_table, p_rows, p_lengths, p_repetition, p_presence, p_frequency, table_stride, first, V, CHUNK: tl.constexpr
):
    """Places and tokens of one program's chunk of its sequence, which of them count, and the sequence's three
    penalties. Tokens are told from `first` on."""
    i_seq = tl.program_id(0)
    row = tl.load(p_rows + i_seq).to(tl.int64)
    repetition = tl.load(p_repetition + row)
    presence = tl.load(p_presence + row)
    frequency = tl.load(p_frequency + row)
    changes = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    length = tl.where(changes, tl.load(p_lengths + i_seq).to(tl.int32), 0)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    p_seq = p_table + row * table_stride
    token = tl.load(p_seq + place, mask=place < length, other=-1) - first
    return place, token, (token >= 0) & (token < V), repetition, presence, frequency


@triton.jit
def _count(
    p_counts,
    p_table,
    p_rows,
    p_num_prompt,
    p_lengths,
    p_repetition,
    p_presence,
    p_frequency,
    table_stride,
    first,
    V,
    CHUNK: tl.constexpr,
):
    place, token, valid, _, _, _ = _tokens(
        p_table, p_rows, p_lengths, p_repetition, p_presence, p_frequency, table_stride, first, V, CHUNK
    )
    num_prompt = tl.load(p_num_prompt + tl.load(p_rows + tl.program_id(0))).to(tl.int32)
    p_mine = p_counts + tl.program_id(0).to(tl.int64) * V + token
    tl.atomic_or(p_mine, PROMPT, mask=valid & (place < num_prompt), sem="relaxed")
    tl.atomic_add(p_mine, 1, mask=valid & (place >= num_prompt), sem="relaxed")


@triton.jit
def _penalise(
    p_logits,
    p_counts,
    p_table,
    p_rows,
    p_lengths,
    p_repetition,
    p_presence,
    p_frequency,
    logits_stride,
    table_stride,
    first,
    V,
    CHUNK: tl.constexpr,
):
    _, token, valid, repetition, presence, frequency = _tokens(
        p_table, p_rows, p_lengths, p_repetition, p_presence, p_frequency, table_stride, first, V, CHUNK
    )
    # Of all places that hold a token, the one that takes its count changes the logit.
    count = tl.atomic_xchg(p_counts + tl.program_id(0).to(tl.int64) * V + token, 0, mask=valid, sem="relaxed")
    owned = valid & (count != 0)
    count = (count & (PROMPT - 1)).to(tl.float32)
    p_mine = p_logits + tl.program_id(0).to(tl.int64) * logits_stride + token
    x = tl.load(p_mine, mask=owned, other=0.0)
    f = x.to(tl.float32)
    f = tl.where(f > 0.0, tl.div_rn(f, repetition), f * repetition)
    f = f - frequency * count - tl.where(count > 0.0, presence, 0.0)
    tl.store(p_mine, f.to(x.dtype), mask=owned)


def penalties(
    workspace: Workspace,
    logits: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    num_prompt: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    first: int = 0,
) -> None:
    """For a token with c occurrences in the output, and seen if it occurs in prompt or output:

        x' = x / repetition if x > 0 else x · repetition    when seen
        x″ = x' − frequency · c − presence · (c > 0)

    One kernel counts each sequence's tokens in a table of sequences × vocabulary; in a second one the first place that
    takes a token's count changes its logit, so the vocabulary itself is never walked. Sequences with neutral penalties
    are left alone. Shapes as in the reference; rows of logits and of the table may be strided.
    """
    seqs, vocab = logits.shape
    if not seqs:
        return
    grid = (seqs, cdiv(token_table.shape[1], _CHUNK))
    counts = torch.zeros((seqs, vocab), dtype=torch.int32, device=logits.device)
    settings = (repetition, presence, frequency)
    workspace.launch(_count, grid)(
        counts,
        token_table,
        rows,
        num_prompt,
        lengths,
        *settings,
        token_table.stride(0),
        first,
        vocab,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    workspace.launch(_penalise, grid)(
        logits,
        counts,
        token_table,
        rows,
        lengths,
        *settings,
        logits.stride(0),
        token_table.stride(0),
        first,
        vocab,
        CHUNK=_CHUNK,
        num_warps=4,
    )
