"""Query and key norm, rotary embedding and KV write in one Triton kernel (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_numbers import to_cache
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.rope import Rope
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Rotated pairs a program takes. Angles, weights and addresses, which heads share, are a third of a small tile's
# instructions: thousands of tokens take more heads at once (measured on an H200).
_TILE, _WIDE_TILE, _WIDE_TOKENS = 1024, 4096, 2048


@triton.jit
def _norm_weights(p_q, p_k, is_q, channels, inside, offset, HAS_Q: tl.constexpr, HAS_K: tl.constexpr):
    """What heads are multiplied with once they are scaled: [heads, channels], 1 for those without a norm."""
    q, k = 1.0, 1.0
    if HAS_Q:
        q = tl.load(p_q + channels, mask=inside, other=0.0).to(tl.float32) + offset
    if HAS_K:
        k = tl.load(p_k + channels, mask=inside, other=0.0).to(tl.float32) + offset
    return tl.where(is_q, q, k)


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
    k_inverse,
    v_inverse,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    i_token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    m_head = head < H + 2 * G
    is_q = head < H
    is_k = (head >= H) & (head < H + G)
    is_v = m_head & (head >= H + G)

    # Channels in three parts: the first and the second of each rotated pair, and the tail that passes through.
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    m_pair = pair < R // 2
    first = pair * 2 if IS_INTERLEAVED else pair
    second = first + 1 if IS_INTERLEAVED else first + R // 2
    tail = R + tl.arange(0, BLOCK_TAIL)[None, :]
    m_tail = tail < D

    # What no kernel of this step writes (places, angles, weights) is read before the wait.
    p_angle = p_cos_sin + tl.load(p_positions + i_token).to(tl.int64) * R + pair
    cos = tl.load(p_angle, mask=m_pair, other=1.0)
    sin = tl.load(p_angle + R // 2, mask=m_pair, other=0.0)
    slot = tl.load(p_slots + i_token).to(tl.int64)
    w_first = _norm_weights(p_q_norm, p_k_norm, is_q, first, m_pair, offset, HAS_Q_NORM, HAS_K_NORM)
    w_second = _norm_weights(p_q_norm, p_k_norm, is_q, second, m_pair, offset, HAS_Q_NORM, HAS_K_NORM)
    if PDL:
        gdc_wait()

    p_head = p_qkv + i_token * qkv_stride + head * D
    x = tl.load(p_head + first, mask=m_head & m_pair, other=0.0)
    y = tl.load(p_head + second, mask=m_head & m_pair, other=0.0)
    a, b = x.to(tl.float32), y.to(tl.float32)
    squares = tl.sum(a * a + b * b, axis=1, keep_dims=True)
    if HAS_TAIL:
        z = tl.load(p_head + tail, mask=m_head & m_tail, other=0.0)
        c = z.to(tl.float32)
        squares += tl.sum(c * c, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / D + eps)
    # Values are stored as they came, whatever becomes of them here.
    if not HAS_Q_NORM:
        scale = tl.where(is_q, 1.0, scale)
    if not HAS_K_NORM:
        scale = tl.where(is_q, scale, 1.0)
    a = a * scale * w_first
    b = b * scale * w_second
    turned_x = (a * cos - b * sin).to(x.dtype)
    turned_y = (b * cos + a * sin).to(x.dtype)

    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    p_k = p_k_cache + block * k_block_stride + place * k_slot_stride + (head - H).to(tl.int64) * k_head_stride
    p_v = p_v_cache + block * v_block_stride + place * v_slot_stride + (head - H - G).to(tl.int64) * v_head_stride
    if HAS_TAIL:
        c = c * scale * _norm_weights(p_q_norm, p_k_norm, is_q, tail, m_tail, offset, HAS_Q_NORM, HAS_K_NORM)
        turned_z = c.to(x.dtype)
    # Queries go out always, keys and values where the token has a slot.
    p_query = p_q + (i_token * H + head) * D
    p_kept = tl.where(is_k, p_k, p_v)
    top = tl.where(slot >= 0, H + 2 * G, H)
    if p_kept.dtype == p_query.dtype:
        p_mine = tl.where(is_q, p_query, p_kept)
        m_mine = m_head & (head < top)
        tl.store(p_mine + first, tl.where(is_v, x, turned_x), mask=m_mine & m_pair)
        tl.store(p_mine + second, tl.where(is_v, y, turned_y), mask=m_mine & m_pair)
        if HAS_TAIL:
            tl.store(p_mine + tail, tl.where(is_v, z, turned_z), mask=m_mine & m_tail)
    else:
        kept: tl.constexpr = p_k_cache.dtype.element_ty
        inverse = tl.where(is_k, k_inverse, v_inverse)
        m_kept = (head >= H) & (head < top)
        tl.store(p_query + first, turned_x, mask=is_q & m_pair)
        tl.store(p_query + second, turned_y, mask=is_q & m_pair)
        tl.store(p_kept + first, to_cache(tl.where(is_v, x, turned_x), inverse, kept), mask=m_kept & m_pair)
        tl.store(p_kept + second, to_cache(tl.where(is_v, y, turned_y), inverse, kept), mask=m_kept & m_pair)
        if HAS_TAIL:
            tl.store(p_query + tail, turned_z, mask=is_q & m_tail)
            tl.store(p_kept + tail, to_cache(tl.where(is_v, z, turned_z), inverse, kept), mask=m_kept & m_tail)


def rope_kv_write(
    workspace: Workspace,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    deterministic: bool = False,
    scales: CacheScales = UNSCALED,
) -> torch.Tensor:
    """Norms q and k a head (when weights are given), rotates them, writes k and v to their slots; returns q.

    For a rotated pair (a, b) at angle θ:  a' = a·cos θ − b·sin θ,  b' = b·cos θ + a·sin θ.
    One program takes about 1024 rotated pairs, 4096 when there are many tokens: whole heads of one token. Shapes as in
    the reference; qkv's rows and the caches' blocks, heads and slots may be strided, channels are contiguous. Keys and
    values are kept in qkv's dtype, or as 8-bit floats over `scales`.
    """
    q = torch.empty((qkv.shape[0], num_heads, k_cache.shape[-1]), dtype=qkv.dtype, device=qkv.device)
    rope_into(workspace, q, qkv, positions, slots, rope, k_cache, v_cache, num_heads, deterministic, scales)
    return q


def rope_into(
    workspace: Workspace,
    q: torch.Tensor,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    deterministic: bool = False,
    scales: CacheScales = UNSCALED,
) -> None:
    """`rope_kv_write` that puts the queries into `q`, contiguous."""
    _, g, block_size, d = k_cache.shape
    tokens = qkv.shape[0]
    if tokens:
        pdl = workspace.pdl
        rotary = rope.cos_sin.shape[1]
        half = next_power_of_2(rotary // 2)
        tile = _WIDE_TILE if tokens >= _WIDE_TOKENS and not deterministic else _TILE
        block_h = min(max(1, tile // half), next_power_of_2(num_heads + 2 * g))
        workspace.launch(_rope, (tokens, cdiv(num_heads + 2 * g, block_h)))(
            qkv,
            positions,
            slots,
            rope.cos_sin,
            k_cache,
            v_cache,
            rope.q_norm if rope.q_norm is not None else qkv,
            rope.k_norm if rope.k_norm is not None else qkv,
            q,
            qkv.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            rope.eps,
            rope.offset,
            1.0 / scales.k,
            1.0 / scales.v,
            H=num_heads,
            G=g,
            D=d,
            R=rotary,
            BLOCK_SIZE=block_size,
            HAS_Q_NORM=rope.q_norm is not None,
            HAS_K_NORM=rope.k_norm is not None,
            IS_INTERLEAVED=rope.interleaved,
            BLOCK_H=block_h,
            BLOCK_HALF=half,
            BLOCK_TAIL=next_power_of_2(max(d - rotary, 1)),
            HAS_TAIL=d > rotary,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
