"""Penalties on tokens that a request already holds (repetition: Keskar et al. 2019, arXiv:1909.05858)."""

from __future__ import annotations

import torch


def penalties(
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

    Sequence i's tokens are token_table[rows[i], :lengths[i]], the first num_prompt[rows[i]] of them its prompt; its
    penalties stand in row rows[i] as well.

    logits [B, V] of the tokens from `first` on, changed in place, computed in float32 and rounded once; token_table
    [R, L] int32; rows, lengths [B] and num_prompt [R] int32 or int64; repetition, presence, frequency [R] float32.
    Table entries outside those tokens count for nothing.
    """
    num_prompt, repetition, presence, frequency = (of[rows] for of in (num_prompt, repetition, presence, frequency))
    vocab = logits.shape[1]
    longest = int(lengths.max())
    tokens = token_table[rows.long(), :longest].long() - first
    place = torch.arange(longest, device=logits.device)[None]
    counts = (place < lengths[:, None]) & (tokens >= 0) & (tokens < vocab)
    outside = torch.where(counts, tokens, vocab)
    zeros = torch.zeros(logits.shape[0], vocab + 1, dtype=torch.float32, device=logits.device)
    ones = torch.ones_like(outside, dtype=torch.float32)
    seen = zeros.scatter(1, outside, ones)[:, :vocab] > 0
    generated = (place >= num_prompt[:, None]).float()
    count = zeros.scatter_add(1, outside, generated)[:, :vocab]

    x = logits.float()
    r = repetition[:, None]
    x = torch.where(seen, torch.where(x > 0, x / r, x * r), x)
    x = x - frequency[:, None] * count - presence[:, None] * (count > 0)
    logits.copy_(x.to(logits.dtype))
