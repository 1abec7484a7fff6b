"""Drawn tokens into the rows' table of tokens, where the next step finds them."""

from __future__ import annotations

import torch


def keep_tokens(drawn: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """tokens[rows[i], lengths[i]] = max(drawn[i], 0); returns drawn as int32.

    drawn [B] int64, −1 for nothing; tokens [R, L] int32, written in place (rows may stand apart); rows and
    lengths [B] int32. Of sequences that share a place any may win.
    """
    tokens[rows, lengths] = drawn.clamp(min=0).int()
    return drawn.int()
