"""What a step's tokens are and where they go: ids, cache slots and block tables, gathered from the rows' tables."""

from __future__ import annotations

import torch


def token_inputs(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    seqs: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token t of sequence l = sequences[t] is tokens[rows[l], p] at p = positions[t]; its slot is the one of p in that
    row:

        slot = blocks[rows[l], p // block_size] · block_size + p mod block_size

    tokens [R, L], blocks [R, M] int32 (rows may stand apart); rows [B], sequences [T], positions [T] int32
    → ids [T] int32, slots [T] int64, the sequences' own block table [B, M] int32.
    """
    row = rows[seqs]
    slots = blocks[row, positions // block_size].long() * block_size + positions % block_size
    return tokens[row, positions], slots, blocks[rows]
