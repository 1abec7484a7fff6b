"""Rotary embedding of the last channels of a head: one program a head of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import dependent_launch


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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # Channels are held as pairs (2i, 2i + 1); those before the rotated ones turn by no angle.
    i = tl.arange(0, BLOCK)
    live = 2 * i < DIM
    plain: tl.constexpr = (DIM - ROPE) // 2
    angle = cos_sin + tl.load(positions + t).to(tl.int64) * ROPE + i - plain
    cos = tl.load(angle, mask=live & (i >= plain), other=1.0)
    sin = tl.load(angle + ROPE // 2, mask=live & (i >= plain), other=0.0)
    if PDL:
        gdc_wait()
    source = x + t * x_stride + head * DIM + 2 * i
    target = out + (t * HEADS + head) * DIM + 2 * i
    a = tl.load(source, mask=live, other=0.0).to(tl.float32)
    b = tl.load(source + 1, mask=live, other=0.0).to(tl.float32)
    tl.store(target, (a * cos - b * sin).to(out.dtype.element_ty), mask=live)
    tl.store(target + 1, (b * cos + a * sin).to(out.dtype.element_ty), mask=live)


def rotate_tail(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """See the reference. The heads of a token are dense."""
    t, heads, dim = x.shape
    out = torch.empty(t, heads, dim, dtype=x.dtype, device=x.device)
    if t:
        pdl = dependent_launch(x.device)
        _turn[(t, heads)](
            x,
            positions,
            cos_sin,
            out,
            x.stride(0),
            HEADS=heads,
            DIM=dim,
            ROPE=cos_sin.shape[1],
            BLOCK=triton.next_power_of_2(dim // 2),
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=1,
        )
    return out
