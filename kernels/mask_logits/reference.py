"""Bans of tokens by one bit each: what a grammar allows next."""

from __future__ import annotations

import torch


def mask_logits(logits: torch.Tensor, seqs: torch.Tensor, masks: torch.Tensor, first: int = 0) -> None:
    """logits[seqs[i], v] = −inf where bit t % 32 of masks[i, t // 32] is 0, with t = first + v.

    logits [B, V] of the tokens from `first` on, changed in place (rows may stand apart); sequences [n] int32, no two
    the same; masks [n, W] int32 with 32 W ≥ first + V.
    """
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks[..., None] >> bits) & 1).flatten(1)[:, first : first + logits.shape[1]].bool()
    rows = seqs.long()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
