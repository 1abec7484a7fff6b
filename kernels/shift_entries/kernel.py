"""Moves a step's entries by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.workspace import Workspace

_BLOCK = 128


@triton.jit(
    do_not_specialize=["dummy"],
    do_not_specialize_on_alignment=[
        "p_lengths",
        "p_positions",
        "p_rows",
        "p_out_rows",
        "p_start",
        "p_counts",
        "p_held",
    ],
)
def _shift(
    p_lengths, p_positions, p_rows, p_out_rows, p_start, p_counts, p_held, dummy,
    HAS_COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """No kernel starts before this one ends: attention reads lengths ahead of its own wait."""
    entry = tl.program_id(0)
    length = tl.load(p_lengths + entry)
    ahead = length - tl.load(p_held + tl.load(p_rows + entry).to(tl.int64))
    if HAS_COUNTS:
        ahead -= tl.load(p_counts + entry)
    ahead = tl.where(tl.load(p_out_rows + entry) == dummy, 0, ahead)
    if ahead != 0:
        tl.store(p_lengths + entry, length - ahead)
        stop = tl.load(p_start + entry + 1)
        for first in range(tl.load(p_start + entry), stop, BLOCK):
            token = first + tl.arange(0, BLOCK)
            position = tl.load(p_positions + token, mask=token < stop, other=0)
            tl.store(p_positions + token, position - ahead, mask=token < stop)


def shift_entries(
    workspace: Workspace,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    out_rows: torch.Tensor,
    query_start: torch.Tensor,
    counts: torch.Tensor | None,
    row_lengths: torch.Tensor,
    dummy: int,
) -> None:
    """Takes off each entry's length and positions how far it was planned too far ahead. Shapes as in the reference."""
    if len(lengths):
        workspace.launch(_shift, (len(lengths),))(
            lengths, positions, rows, out_rows, query_start, counts, row_lengths, dummy,
            HAS_COUNTS=counts is not None, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
