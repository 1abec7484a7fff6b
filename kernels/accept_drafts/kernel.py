"""Compares drafts with draws by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

_BLOCK = 16


@triton.jit(
    do_not_specialize=["B"],
    do_not_specialize_on_alignment=[
        "p_drawn", "p_ids", "p_last", "p_counts", "p_lengths", "p_out_rows", "p_row_lengths",
    ],
)  # fmt: skip
def _accept(
    p_drawn, p_ids, p_last, p_counts, p_lengths, p_out_rows, p_row_lengths, p_given, B,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = entry < B
    count = tl.load(p_counts + entry, mask=held, other=0)
    first = tl.load(p_last + entry, mask=held, other=0) - count
    within = tl.arange(0, BLOCK_D)[None]
    drafted = held[:, None] & (within < count[:, None])
    place = first[:, None] + within
    drawn = tl.load(p_drawn + place, mask=drafted, other=0)
    same = drafted & (drawn == tl.load(p_ids + place + 1, mask=drafted, other=0))
    accepted = tl.min(tl.where(same, BLOCK_D, within), axis=1)
    behind = tl.load(p_drawn + first + accepted, mask=held, other=0)
    given = accepted + 1 - ((behind < 0) & (accepted > 0)).to(tl.int32)
    tl.store(p_given + entry, given, mask=held)
    tl.store(p_given + B + entry, first + given - 1, mask=held)
    row = tl.load(p_out_rows + entry, mask=held, other=0).to(tl.int64)
    length = tl.load(p_lengths + entry, mask=held, other=0)
    tl.store(p_row_lengths + row, length - count + given, mask=held)


def accept_drafts(
    workspace: Workspace,
    drawn: torch.Tensor,
    ids: torch.Tensor,
    last: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    out_rows: torch.Tensor,
    row_lengths: torch.Tensor,
    depth: int,
) -> torch.Tensor:
    """Tokens that each entry gave, its drafts up to the first that differs from its draw, and the last kept one's
    place. Shapes as in the reference."""
    entries = len(counts)
    given = torch.empty((2, entries), dtype=torch.int32, device=drawn.device)
    if entries:
        workspace.launch(_accept, (cdiv(entries, _BLOCK),))(
            drawn, ids, last, counts, lengths, out_rows, row_lengths, given, entries,
            BLOCK=_BLOCK, BLOCK_D=next_power_of_2(depth + 1), num_warps=1,
        )  # fmt: skip
    return given
