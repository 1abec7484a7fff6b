"""Rotary embedding of the last channels of a head: one program some heads of a token, channels in their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

TILE = 2048


@triton.jit
def turn_pairs(x, cos, sin, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr):
    """x [BLOCK_H, BLOCK] with the pairs (2i, 2i + 1) of its channels turned; cos and sin [BLOCK / 2]."""
    a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK // 2, 2)))
    turned = tl.join(a * cos[None] - b * sin[None], b * cos[None] + a * sin[None])
    return tl.reshape(turned, (BLOCK_H, BLOCK))


@triton.jit
def angles(cos_sin, position, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """cos and sin of each pair of a head's channels; those before the rotated ones turn by no angle."""
    i = tl.arange(0, BLOCK // 2)
    plain: tl.constexpr = (DIM - ROPE) // 2
    turned = (2 * i < DIM) & (i >= plain)
    angle = cos_sin + position.to(tl.int64) * ROPE + i - plain
    return tl.load(angle, mask=turned, other=1.0), tl.load(angle + ROPE // 2, mask=turned, other=0.0)


@triton.jit(do_not_specialize=["x_stride"])
def _turn(
    x,
    positions,
    cos_sin,
    out,
    x_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK)
    live = (h < HEADS)[:, None] & (d < DIM)[None]
    place = h[:, None] * DIM + d[None]
    cos, sin = angles(cos_sin, tl.load(positions + t), DIM, ROPE, BLOCK)
    if PDL:
        gdc_wait()
    v = tl.load(x + t * x_stride + place, mask=live, other=0.0).to(tl.float32)
    v = turn_pairs(v, cos, sin, BLOCK_H, BLOCK)
    tl.store(out + t * (HEADS * DIM) + place, v.to(out.dtype.element_ty), mask=live)


def rotate_tail(workspace: Workspace, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """See the reference. The heads of a token are dense."""
    t, heads, dim = x.shape
    out = torch.empty(t, heads, dim, dtype=x.dtype, device=x.device)
    if t:
        pdl = workspace.pdl
        block = next_power_of_2(dim)
        block_h = max(1, min(TILE // block, next_power_of_2(heads)))
        workspace.launch(_turn, (t, cdiv(heads, block_h)))(
            x,
            positions,
            cos_sin,
            out,
            x.stride(0),
            HEADS=heads,
            DIM=dim,
            ROPE=cos_sin.shape[1],
            BLOCK_H=block_h,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
    return out
