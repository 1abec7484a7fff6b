"""Query and key norm, rotary embedding of the last channels and the cache write: one program a head of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import dependent_launch


@triton.jit(do_not_specialize=["q_stride"])
def _write(
    q,
    kv,
    positions,
    slots,
    cos_sin,
    cache,
    norm,
    out,
    q_stride,
    kv_stride,
    block_stride,
    entry_stride,
    block_size,
    eps,
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
    turned = live & (i >= plain)
    angle = cos_sin + tl.load(positions + t).to(tl.int64) * ROPE + i - plain
    cos = tl.load(angle, mask=turned, other=1.0)
    sin = tl.load(angle + ROPE // 2, mask=turned, other=0.0)
    slot = tl.load(slots + t)
    if PDL:
        gdc_wait()
    if head < HEADS:
        source = q + t * q_stride + head * DIM
        target = out + (t * HEADS + head) * DIM
    else:
        if slot < 0:
            return
        source = kv + t * kv_stride
        target = cache + slot // block_size * block_stride + slot % block_size * entry_stride
    a = tl.load(source + 2 * i, mask=live, other=0.0).to(tl.float32)
    b = tl.load(source + 2 * i + 1, mask=live, other=0.0).to(tl.float32)
    unit = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + eps)
    a, b = a * unit, b * unit
    if head == HEADS:
        a *= tl.load(norm + 2 * i, mask=live, other=0.0).to(tl.float32)
        b *= tl.load(norm + 2 * i + 1, mask=live, other=0.0).to(tl.float32)
    tl.store(target + 2 * i, (a * cos - b * sin).to(out.dtype.element_ty), mask=live)
    tl.store(target + 2 * i + 1, (b * cos + a * sin).to(out.dtype.element_ty), mask=live)


def shared_kv_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    norm: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """See the reference. The heads of a token and all last axes are dense; cache and q have one dtype."""
    t, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if t:
        pdl = dependent_launch(q.device)
        _write[(t, heads + 1)](
            q,
            kv,
            positions,
            slots,
            cos_sin,
            cache,
            norm,
            out,
            q.stride(0),
            kv.stride(0),
            cache.stride(0),
            cache.stride(1),
            cache.shape[1],
            eps,
            HEADS=heads,
            DIM=dim,
            ROPE=cos_sin.shape[1],
            BLOCK=triton.next_power_of_2(dim // 2),
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=1,
        )
    return out
