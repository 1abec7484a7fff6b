"""Puts drafts into the table by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace


@triton.jit(
    do_not_specialize=["L_stride"],
    do_not_specialize_on_alignment=["p_proposed", "p_starts", "p_sizes", "p_counts", "p_lengths", "p_rows", "p_tokens"],
)
def _put(
    p_proposed, p_starts, p_sizes, p_counts, p_lengths, p_rows, p_tokens, P_stride, L_stride, BLOCK: tl.constexpr
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    count = tl.load(p_counts + entry)
    within = tl.arange(0, BLOCK)
    drafted = within < count
    at = tl.load(p_lengths + entry) - count + within
    own = tl.minimum(tl.maximum(at - tl.load(p_starts + entry), 0), tl.load(p_sizes + entry) - 1)
    token = tl.load(p_proposed + entry * P_stride + tl.maximum(own, 0), mask=drafted, other=0)
    tl.store(p_tokens + tl.load(p_rows + entry).to(tl.int64) * L_stride + at, token, mask=drafted)


def put_drafts(
    workspace: Workspace,
    proposed: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """tokens[rows_b, lengths_b − counts_b + j] is what entry b proposes for that place. Shapes as in the reference."""
    if len(counts):
        workspace.launch(_put, (len(counts),))(
            proposed, starts, sizes, counts, lengths, rows, tokens, proposed.stride(0), tokens.stride(0),
            BLOCK=next_power_of_2(proposed.shape[1]), num_warps=1,
        )  # fmt: skip
