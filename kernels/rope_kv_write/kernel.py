"""Query and key norm, rotary embedding and KV write in one Triton kernel (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import dependent_launch

_TILE = 1024


@triton.jit(do_not_specialize_on_alignment=["p_positions", "p_slots"])
def _rope(
    p_qkv,
    p_positions,
    p_slots,
    p_cos_sin,
    p_k_cache,
    p_v_cache,
    p_q_norm,
    p_k_norm,
    p_q,
    qkv_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    eps,
    offset,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    m_channel = channel < D
    m_tile = (head < H + 2 * G) & m_channel
    is_q = head < H
    is_k = (head >= H) & (head < H + G)

    # Each channel sits beside the one it is rotated with; the second read is served by the cache.
    if IS_INTERLEAVED:
        partner = channel ^ 1
        pair = channel // 2
        is_first = channel % 2 == 0
    else:
        partner = tl.where(channel < R // 2, channel + R // 2, channel - R // 2)
        pair = channel % (R // 2)
        is_first = channel < R // 2
    rotates = channel < R
    partner = tl.where(rotates, partner, channel)

    p_head = p_qkv + i_token * qkv_stride + head * D
    x = tl.load(p_head + channel, mask=m_tile, other=0.0)
    a = x.to(tl.float32)
    b = tl.load(p_head + partner, mask=m_tile, other=0.0).to(tl.float32)
    if HAS_Q_NORM or HAS_K_NORM:
        scale = tl.rsqrt(tl.sum(a * a, axis=1, keep_dims=True) / D + eps)
        if HAS_Q_NORM:
            weight = tl.load(p_q_norm + channel, mask=m_channel, other=0.0).to(tl.float32) + offset
            weight_b = tl.load(p_q_norm + partner, mask=m_channel, other=0.0).to(tl.float32) + offset
            a = tl.where(is_q, a * scale * weight, a)
            b = tl.where(is_q, b * scale * weight_b, b)
        if HAS_K_NORM:
            weight = tl.load(p_k_norm + channel, mask=m_channel, other=0.0).to(tl.float32) + offset
            weight_b = tl.load(p_k_norm + partner, mask=m_channel, other=0.0).to(tl.float32) + offset
            a = tl.where(is_k, a * scale * weight, a)
            b = tl.where(is_k, b * scale * weight_b, b)

    p_angle = p_cos_sin + tl.load(p_positions + i_token).to(tl.int64) * R + pair
    cos = tl.load(p_angle, mask=rotates, other=1.0)
    sin = tl.load(p_angle + R // 2, mask=rotates, other=0.0)
    turned = (a * cos + tl.where(is_first, -b, b) * sin).to(x.dtype)
    tl.store(p_q + (i_token * H + head) * D + channel, turned, mask=is_q & m_channel)

    slot = tl.load(p_slots + i_token).to(tl.int64)
    written = tl.where(slot >= 0, H + 2 * G, 0)
    m_live = (head < written) & m_channel
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    p_k = p_k_cache + block * k_block_stride + place * k_slot_stride + (head - H).to(tl.int64) * k_head_stride
    tl.store(p_k + channel, turned.to(p_k_cache.dtype.element_ty), mask=m_live & is_k)
    p_v = p_v_cache + block * v_block_stride + place * v_slot_stride + (head - H - G).to(tl.int64) * v_head_stride
    tl.store(p_v + channel, x.to(p_v_cache.dtype.element_ty), mask=m_live & (head >= H + G))


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Norms q and k a head (when weights are given), rotates them, writes k and v to their slots; returns q.

    For a rotated pair (a, b) at angle θ:  a' = a·cos θ − b·sin θ,  b' = b·cos θ + a·sin θ.
    One program takes about 1024 channels, whole heads of one token. Shapes as in the reference; qkv's rows and the
    caches' blocks, heads and slots may be strided, channels are contiguous.
    """
    _, g, block_size, d = k_cache.shape
    tokens = qkv.shape[0]
    q = torch.empty((tokens, num_heads, d), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        pdl = dependent_launch(qkv.device)
        block_d = triton.next_power_of_2(d)
        block_h = min(max(1, _TILE // block_d), triton.next_power_of_2(num_heads + 2 * g))
        _rope[(tokens, triton.cdiv(num_heads + 2 * g, block_h))](
            qkv,
            positions,
            slots,
            cos_sin,
            k_cache,
            v_cache,
            q_norm if q_norm is not None else qkv,
            k_norm if k_norm is not None else qkv,
            q,
            qkv.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            eps,
            offset,
            H=num_heads,
            G=g,
            D=d,
            R=cos_sin.shape[1],
            BLOCK_SIZE=block_size,
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            IS_INTERLEAVED=interleaved,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
    return q
