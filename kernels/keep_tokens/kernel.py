"""Keeps drawn tokens by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv
from kernels.workspace import Workspace

_BLOCK = 256


@triton.jit(
    do_not_specialize=["B", "stride"],
    do_not_specialize_on_alignment=["p_drawn", "p_tokens", "p_rows", "p_lengths"],
)
def _keep(p_drawn, p_tokens, p_rows, p_lengths, p_out, B, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = seq < B
    drawn = tl.load(p_drawn + seq, mask=held, other=0).to(tl.int32)
    row = tl.load(p_rows + seq, mask=held, other=0).to(tl.int64)
    length = tl.load(p_lengths + seq, mask=held, other=0)
    tl.store(p_tokens + row * stride + length, tl.maximum(drawn, 0), mask=held)
    tl.store(p_out + seq, drawn, mask=held)


def keep_tokens(
    workspace: Workspace, drawn: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """tokens[rows[i], lengths[i]] = max(drawn[i], 0); returns drawn as int32. Shapes as in the reference."""
    out = torch.empty(drawn.shape, dtype=torch.int32, device=drawn.device)
    if len(drawn):
        grid = (cdiv(len(drawn), _BLOCK),)
        pdl = workspace.pdl
        found = (drawn, tokens, rows, lengths, out, len(drawn), tokens.stride(0))
        workspace.launch(_keep, grid)(*found, BLOCK=_BLOCK, PDL=pdl, launch_pdl=pdl, num_warps=4)
    return out
