"""Gathers a step's inputs from the rows' tables in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sizes import cdiv
from kernels.workspace import Workspace

_TOKENS, _ENTRIES = 128, 1024


@triton.jit(
    do_not_specialize=["num_tokens", "token_programs", "L_stride", "M"],
    do_not_specialize_on_alignment=["p_tokens", "p_blocks", "p_rows", "p_seqs", "p_positions"],
)
def _inputs(
    p_tokens,
    p_blocks,
    p_rows,
    p_seqs,
    p_positions,
    p_ids,
    p_slots,
    p_table,
    num_tokens,
    token_programs,
    L_stride,
    M_stride,
    M,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The first `token_programs` programs take BLOCK_T tokens each, the others BLOCK_M entries of a sequence's table.

    No kernel starts before this one ends: attention reads tables ahead of its own wait.
    """
    program = tl.program_id(0)
    if program < token_programs:
        token = program * BLOCK_T + tl.arange(0, BLOCK_T)
        held = token < num_tokens
        seq = tl.load(p_seqs + token, mask=held, other=0)
        row = tl.load(p_rows + seq, mask=held, other=0).to(tl.int64)
        position = tl.load(p_positions + token, mask=held, other=0)
        block = tl.load(p_blocks + row * M_stride + position // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        tl.store(p_ids + token, tl.load(p_tokens + row * L_stride + position, mask=held, other=0), mask=held)
        tl.store(p_slots + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=held)
    else:
        parts = (M + BLOCK_M - 1) // BLOCK_M
        own = ((program - token_programs) // parts).to(tl.int64)
        entry = (program - token_programs) % parts * BLOCK_M + tl.arange(0, BLOCK_M)
        p_from = p_blocks + tl.load(p_rows + own).to(tl.int64) * M_stride
        tl.store(p_table + own * M + entry, tl.load(p_from + entry, mask=entry < M, other=0), mask=entry < M)


def token_inputs(
    workspace: Workspace,
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

    Shapes as in the reference; the tables' rows may stand apart.
    """
    count, entries = len(positions), blocks.shape[1]
    device = tokens.device
    ids = torch.empty(count, dtype=torch.int32, device=device)
    slots = torch.empty(count, dtype=torch.int64, device=device)
    table = torch.empty((len(rows), entries), dtype=torch.int32, device=device)
    token_programs = cdiv(count, _TOKENS)
    programs = token_programs + len(rows) * cdiv(entries, _ENTRIES)
    if programs:
        workspace.launch(_inputs, (programs,))(
            tokens,
            blocks,
            rows,
            seqs,
            positions,
            ids,
            slots,
            table,
            count,
            token_programs,
            tokens.stride(0),
            blocks.stride(0),
            entries,
            BLOCK_SIZE=block_size,
            BLOCK_T=_TOKENS,
            BLOCK_M=_ENTRIES,
            num_warps=4,
        )
    return ids, slots, table
