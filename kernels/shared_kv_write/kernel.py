"""Query and key norm, rotary embedding of the last channels and the cache write: one program some heads of a token; the
key-value vector has programs of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.rotate_tail.kernel import angles, turn_pairs
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

TILE = 4096


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
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    # the first program takes the key-value vector, as one head
    part = tl.program_id(1)
    h = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK)
    cos, sin = angles(cos_sin, tl.load(positions + t), DIM, ROPE, BLOCK)
    slot = tl.load(slots + t)
    weight = tl.load(norm + d, mask=d < DIM, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if part == 0:
        if slot >= 0:
            live = (d < DIM)[None]
            v = tl.load(kv + t * kv_stride + d[None], mask=live, other=0.0).to(tl.float32)
            v = v * tl.rsqrt(tl.sum(v * v, 1) / DIM + eps)[:, None] * weight[None]
            v = turn_pairs(v, cos, sin, 1, BLOCK)
            entry = cache + slot // block_size * block_stride + slot % block_size * entry_stride
            tl.store(entry + d[None], v.to(cache.dtype.element_ty), mask=live)
    else:
        inside = (h < HEADS)[:, None] & (d < DIM)[None]
        place = h[:, None] * DIM + d[None]
        x = tl.load(q + t * q_stride + place, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = turn_pairs(x, cos, sin, BLOCK_H, BLOCK)
        tl.store(out + t * (HEADS * DIM) + place, x.to(out.dtype.element_ty), mask=inside)


def shared_kv_write(
    workspace: Workspace,
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
        pdl = workspace.pdl
        block = next_power_of_2(dim)
        block_h = max(1, min(TILE // block, next_power_of_2(heads)))
        workspace.launch(_write, (t, 1 + cdiv(heads, block_h)))(
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
            BLOCK_H=block_h,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
    return out
