"""Norm of the key-value latent, rotary embedding and the write into a latent cache.

A token's first program writes its entry, the others turn its queries, some heads each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(
    q_rope,
    kv,
    positions,
    slots,
    cos_sin,
    cache,
    norm,
    out,
    q_token_stride,
    q_head_stride,
    kv_stride,
    block_stride,
    entry_stride,
    block_size,
    eps,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_R)
    half: tl.constexpr = ROPE // 2
    real = pair < half
    angle = cos_sin + tl.load(positions + t).to(tl.int64) * ROPE
    cos = tl.load(angle + pair, mask=real, other=0.0)
    sin = tl.load(angle + half + pair, mask=real, other=0.0)
    if INTERLEAVED:
        ia = 2 * pair
        ib = 2 * pair + 1
    else:
        ia = pair
        ib = pair + half

    part = tl.program_id(1)
    slot = tl.load(slots + t)
    if (part == 0) & (slot >= 0):
        entry = cache + slot // block_size * block_stride + slot % block_size * entry_stride
        i = tl.arange(0, BLOCK_L)
        f = tl.load(kv + t * kv_stride + i, mask=i < LATENT, other=0.0).to(tl.float32)
        f = f * tl.rsqrt(tl.sum(f * f, 0) / LATENT + eps)
        f = f * tl.load(norm + i, mask=i < LATENT, other=0.0).to(tl.float32)
        tl.store(entry + i, f.to(cache.dtype.element_ty), mask=i < LATENT)
        a = tl.load(kv + t * kv_stride + LATENT + ia, mask=real, other=0.0).to(tl.float32)
        b = tl.load(kv + t * kv_stride + LATENT + ib, mask=real, other=0.0).to(tl.float32)
        tl.store(entry + LATENT + ia, (a * cos - b * sin).to(cache.dtype.element_ty), mask=real)
        tl.store(entry + LATENT + ib, (b * cos + a * sin).to(cache.dtype.element_ty), mask=real)

    if part > 0:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head[:, None] < HEADS) & real[None]
        source = q_rope + t * q_token_stride + head[:, None] * q_head_stride
        target = out + (t * HEADS + head[:, None]) * ROPE
        qa = tl.load(source + ia[None], mask=inside, other=0.0).to(tl.float32)
        qb = tl.load(source + ib[None], mask=inside, other=0.0).to(tl.float32)
        tl.store(target + ia[None], (qa * cos[None] - qb * sin[None]).to(out.dtype.element_ty), mask=inside)
        tl.store(target + ib[None], (qb * cos[None] + qa * sin[None]).to(out.dtype.element_ty), mask=inside)


def latent_write(
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    norm: torch.Tensor,
    eps: float = 1e-6,
    interleaved: bool = True,
) -> torch.Tensor:
    """See the reference. The last axis of every tensor is dense."""
    t, heads, rope = q_rope.shape
    out = torch.empty(t, heads, rope, dtype=q_rope.dtype, device=q_rope.device)
    if t:
        block_h = min(16, triton.next_power_of_2(heads))
        _write[(t, 1 + triton.cdiv(heads, block_h))](
            q_rope,
            kv,
            positions,
            slots,
            cos_sin,
            cache,
            norm,
            out,
            q_rope.stride(0),
            q_rope.stride(1),
            kv.stride(0),
            cache.stride(0),
            cache.stride(1),
            cache.shape[1],
            eps,
            HEADS=heads,
            LATENT=norm.shape[0],
            ROPE=rope,
            INTERLEAVED=interleaved,
            BLOCK_H=block_h,
            BLOCK_L=triton.next_power_of_2(norm.shape[0]),
            BLOCK_R=triton.next_power_of_2(rope // 2),
            num_warps=2,
        )
    return out
