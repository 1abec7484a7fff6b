"""RMS norm of each head, times an activated gate: one program some heads of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

TILE = 2048


@triton.jit
def _norm(
    x,
    gate,
    weight,
    out,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < DIM, other=0.0).to(tl.float32)
    live = (h < HEADS)[:, None] & (i < DIM)[None]
    place = h[:, None] * DIM + i[None]
    if PDL:
        gdc_wait()
    f = tl.load(x + t * (HEADS * DIM) + place, mask=live, other=0.0).to(tl.float32)
    g = tl.load(gate + t * gate_stride + place, mask=live, other=0.0).to(tl.float32)
    f = f * tl.rsqrt(tl.sum(f * f, 1) / DIM + eps)[:, None] * w[None] * (g / (1.0 + tl.exp(-g)))
    tl.store(out + t * (HEADS * DIM) + place, f.to(out.dtype.element_ty), mask=live)


def gated_norm(
    workspace: Workspace, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See the reference. The last axis of gate is dense."""
    t, heads, dim = x.shape
    x = x.contiguous()
    out = torch.empty(t, heads * dim, dtype=x.dtype, device=x.device)
    if t:
        block = next_power_of_2(dim)
        block_h = max(1, min(TILE // block, next_power_of_2(heads)))
        pdl = workspace.pdl
        workspace.launch(_norm, (t, cdiv(heads, block_h)))(
            x,
            gate,
            weight,
            out,
            gate.stride(0),
            eps,
            HEADS=heads,
            DIM=dim,
            BLOCK_H=block_h,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
    return out
