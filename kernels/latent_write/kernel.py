# mypy: disable-error-code="no-untyped-def"
"""What stands between the projections and attention over a latent cache, in one launch.

Some programs take queries through the up-projection of keys, a head and some latent channels each; a token's first
other program writes its entry, the rest turn its queries, some heads each. From many tokens on the up-projection is
cuBLAS's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import dependent_launch

# Tokens up to which the up-projection is part of the launch.
FEW_TOKENS = 64


@triton.jit
def _turn(x, cos, sin, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """x [ROWS, 2 · HALF] by angles cos, sin [HALF]."""
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
        return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (ROWS, 2 * HALF))
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    y = tl.join(a * cos - b * sin, b * cos + a * sin)
    return tl.reshape(tl.permute(y, (0, 2, 1)), (ROWS, 2 * HALF))


@triton.jit(do_not_specialize=["absorb_programs", "absorbed"])
def _write(
    q,
    kv,
    kv_up,
    positions,
    slots,
    cos_sin,
    cache,
    norm,
    taken,
    q_token_stride,
    q_head_stride,
    kv_stride,
    up_stride,
    block_stride,
    entry_stride,
    block_size,
    eps,
    absorb_programs,
    absorbed,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """HALF is half of the rotated channels, a power of two."""
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    width: tl.constexpr = LATENT + 2 * HALF
    if pid < absorb_programs:
        parts: tl.constexpr = (LATENT + BLOCK_C - 1) // BLOCK_C
        channel = pid % parts * BLOCK_C + tl.arange(0, BLOCK_C)
        own_head = (pid // parts % HEADS).to(tl.int64)
        row = pid // (parts * HEADS) * BLOCK_T + tl.arange(0, BLOCK_T)
        plain = tl.arange(0, BLOCK_D)
        up = tl.load(
            kv_up + own_head * up_stride + plain[:, None] * LATENT + channel[None, :],
            mask=(plain < NOPE)[:, None] & (channel < LATENT)[None, :],
            other=0.0,
        )
        if PDL:
            gdc_wait()
        x_plain = tl.load(
            q + row.to(tl.int64)[:, None] * q_token_stride + own_head * q_head_stride + plain[None, :],
            mask=(row < absorbed)[:, None] & (plain < NOPE)[None, :],
            other=0.0,
        )
        y_plain = tl.dot(x_plain, up, input_precision=PRECISION)
        tl.store(
            taken + (row.to(tl.int64)[:, None] * HEADS + own_head) * width + channel[None, :],
            y_plain.to(taken.dtype.element_ty),
            mask=(row < absorbed)[:, None] & (channel < LATENT)[None, :],
        )
    else:
        head_parts: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
        rest = pid - absorb_programs
        part = rest % (1 + head_parts)
        t = (rest // (1 + head_parts)).to(tl.int64)
        half = tl.arange(0, HALF)
        both = tl.arange(0, 2 * HALF)
        if PDL:
            gdc_wait()
        angle = cos_sin + tl.load(positions + t).to(tl.int64) * (2 * HALF)
        cos = tl.load(angle + half)[None, :]
        sin = tl.load(angle + HALF + half)[None, :]
        if part == 0:
            slot = tl.load(slots + t)
            if slot >= 0:
                entry = cache + slot // block_size * block_stride + slot % block_size * entry_stride
                i = tl.arange(0, BLOCK_L)
                f = tl.load(kv + t * kv_stride + i, mask=i < LATENT, other=0.0).to(tl.float32)
                f = f * tl.rsqrt(tl.sum(f * f, 0) / LATENT + eps)
                f = f * tl.load(norm + i, mask=i < LATENT, other=0.0).to(tl.float32)
                tl.store(entry + i, f.to(cache.dtype.element_ty), mask=i < LATENT)
                key = tl.load(kv + t * kv_stride + LATENT + both).to(tl.float32)
                key = _turn(key[None, :], cos, sin, INTERLEAVED, 1, HALF)
                tl.store(entry + LATENT + both[None, :], key.to(cache.dtype.element_ty))
        else:
            head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
            own = q + t * q_token_stride + head * q_head_stride + NOPE + both[None, :]
            x = tl.load(own, mask=head < HEADS, other=0.0).to(tl.float32)
            x = _turn(x, cos, sin, INTERLEAVED, BLOCK_H, HALF).to(q.dtype.element_ty)
            tl.store(own, x, mask=head < HEADS)
            heads = tl.where(t < absorbed, HEADS, 0)
            tl.store(taken + (t * HEADS + head) * width + LATENT + both[None, :], x, mask=head < heads)


def latent_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_up: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    norm: torch.Tensor,
    absorbed: int,
    eps: float = 1e-6,
    interleaved: bool = True,
) -> torch.Tensor:
    """See the reference. The last axis of every tensor is dense, kv_up is contiguous, P is twice a power of two."""
    t, heads, width = q.shape
    latent, rope = norm.shape[0], cos_sin.shape[1]
    nope = width - rope
    taken = torch.empty(absorbed, heads, latent + rope, dtype=q.dtype, device=q.device)
    if not t:
        return taken
    pdl = dependent_launch(q.device)
    block_t = 16 if absorbed <= 16 else 32
    block_c = min(128, max(16, triton.next_power_of_2(latent)))
    block_h = min(16, triton.next_power_of_2(heads))
    within = 0 < absorbed <= FEW_TOKENS
    absorb_programs = triton.cdiv(absorbed, block_t) * heads * triton.cdiv(latent, block_c) if within else 0
    _write[(absorb_programs + t * (1 + triton.cdiv(heads, block_h)),)](
        q, kv, kv_up, positions, slots, cos_sin, cache, norm, taken, q.stride(0), q.stride(1), kv.stride(0),
        kv_up.stride(0), cache.stride(0), cache.stride(1), cache.shape[1], eps, absorb_programs, absorbed,
        HEADS=heads, NOPE=nope, LATENT=latent, HALF=rope // 2, INTERLEAVED=interleaved, BLOCK_T=block_t,
        BLOCK_D=max(16, triton.next_power_of_2(nope)), BLOCK_C=block_c, BLOCK_H=block_h,
        BLOCK_L=triton.next_power_of_2(latent), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    if absorbed and not within:
        plain = q[:absorbed, :, :nope].transpose(0, 1)
        torch.bmm(plain, kv_up[:, :nope], out=taken[..., :latent].transpose(0, 1))
    return taken
