"""What a step's tokens are and where they go: ids, cache slots and block tables, gathered from the rows' tables."""

from __future__ import annotations

import torch


def token_inputs(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    lines: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token t of line l = lines[t] is tokens[rows[l], p] at p = positions[t]; its slot is the one of p in that row:

        slot = blocks[rows[l], p // block_size] · block_size + p mod block_size

    tokens [R, L], blocks [R, M] int32 (rows may stand apart); rows [B], lines [T], positions [T] int32
    → ids [T] int32, slots [T] int64, the lines' own block table [B, M] int32.
    """
    row = rows[lines]
    slots = blocks[row, positions // block_size].long() * block_size + positions % block_size
    return tokens[row, positions], slots, blocks[rows]
