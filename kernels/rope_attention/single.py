# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel for lines of one new token: norm, rotation and KV write in the prologue of attention.

A program owns a kv head of a line, or a share of its keys. What the line has cached was written by earlier steps, so
its first tile of keys and values is loaded before the wait for the kernel that computes q, k and v. The new token's own
key and value are attended to from registers, by the program of the last share, which also writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.paged_attention.attend import LOG2E, even_shares, fair_share, merge_splits


@triton.jit
def _fold(
    acc,
    m,
    l,
    q,
    k,
    v,
    key,
    oldest,
    stop,
    scale,
    softcap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of cached keys. Of a tile that holds a key at all, m is finite afterwards."""
    s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
    if HAS_SOFTCAP:
        s = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * scale / softcap * s) - 1.0)
    else:
        s = s * (scale * LOG2E)
    if HAS_WINDOW:
        s = tl.where(((key < stop) & (key >= oldest))[None, :], s, float("-inf"))
    else:
        s = tl.where((key < stop)[None, :], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    weight = tl.exp2(s - top[:, None])
    shrink = tl.exp2(m - top)
    l = l * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return acc, top, l


@triton.jit(
    do_not_specialize=["num_lines", "splits", "programs", "least"],
    do_not_specialize_on_alignment=["p_positions", "p_slots", "p_context"],
)
def attend_single(
    p_qkv,
    p_positions,
    p_slots,
    p_cos_sin,
    p_q_norm,
    p_k_norm,
    p_k_cache,
    p_v_cache,
    p_table,
    p_context,
    p_out,
    p_partial,
    p_lse,
    p_arrived,
    qkv_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    table_stride,
    eps,
    offset,
    scale,
    softcap,
    window,
    num_lines,
    splits,
    programs,
    least,
    H: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    i_split = tl.program_id(2)
    length = tl.load(p_context + line)
    past = tl.maximum(length - 1, 0)
    oldest = 0
    begin = 0
    if HAS_WINDOW:
        oldest = tl.maximum(length - window, 0)
        begin = oldest // BLOCK_N * BLOCK_N
    chunk = tl.maximum(past - begin, 1)
    active = 1
    if SPLITS > 1:
        share = (chunk + splits - 1) // splits
        share = tl.maximum(share, fair_share(p_context, num_lines, window, programs, G, BLOCK_B, HAS_WINDOW))
        share, active = even_shares(chunk, tl.maximum(share, least), BLOCK_N)
        if i_split >= active:
            return
        chunk = share
    start = begin + i_split * chunk
    stop = tl.minimum(start + chunk, past)
    last = i_split == active - 1

    channel = tl.arange(0, BLOCK_D)
    m_channel = channel < D
    p_k = p_k_cache + i_group.to(tl.int64) * k_head_stride
    p_v = p_v_cache + i_group.to(tl.int64) * v_head_stride
    p_blocks = p_table + line * table_stride
    key = start + tl.arange(0, BLOCK_N)
    block = tl.load(p_blocks + key // BLOCK_SIZE, mask=key < stop, other=0).to(tl.int64)
    following = key + BLOCK_N
    ahead = tl.load(p_blocks + following // BLOCK_SIZE, mask=following < stop, other=0)
    place = key % BLOCK_SIZE
    k = tl.load(
        p_k + (block * k_block_stride + place * k_slot_stride)[None, :] + channel[:, None],
        mask=(key < stop)[None, :] & m_channel[:, None],
        other=0.0,
    )
    v = tl.load(
        p_v + (block * v_block_stride + place * v_slot_stride)[:, None] + channel[None, :],
        mask=(key < stop)[:, None] & m_channel[None, :],
        other=0.0,
    )

    # A channel turns with its partner: y = x·cos + partner·sin, sin negative for the first of a pair.
    turns = channel < R
    if IS_INTERLEAVED:
        pair = channel // 2
        is_first = channel % 2 == 0
        partner = tl.where(turns, tl.where(is_first, channel + 1, channel - 1), channel)
    else:
        is_first = channel < R // 2
        pair = tl.where(is_first, channel, channel - R // 2)
        partner = tl.where(turns, tl.where(is_first, channel + R // 2, channel - R // 2), channel)
    p_angle = p_cos_sin + tl.load(p_positions + line).to(tl.int64) * R + pair
    cos = tl.load(p_angle, mask=turns, other=1.0)
    sin = tl.load(p_angle + R // 2, mask=turns, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    slot = tl.load(p_slots + line).to(tl.int64)
    if HAS_Q_NORM:
        q_weight = tl.load(p_q_norm + channel, mask=m_channel, other=0.0).to(tl.float32) + offset
        q_other = tl.load(p_q_norm + partner, mask=m_channel, other=0.0).to(tl.float32) + offset
    if HAS_K_NORM:
        k_weight = tl.load(p_k_norm + channel, mask=m_channel, other=0.0).to(tl.float32) + offset
        k_other = tl.load(p_k_norm + partner, mask=m_channel, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()

    rows = tl.arange(0, BLOCK_M)
    head = i_group * GROUP + rows
    m_rows = (rows < GROUP)[:, None] & m_channel[None, :]
    p_mine = p_qkv + line * qkv_stride
    x = tl.load(p_mine + head[:, None] * D + channel[None, :], mask=m_rows, other=0.0)
    other = tl.load(p_mine + head[:, None] * D + partner[None, :], mask=m_rows, other=0.0).to(tl.float32)
    p_new = p_mine + (H + i_group) * D
    new = tl.load(p_new + channel, mask=m_channel, other=0.0).to(tl.float32)
    new_other = tl.load(p_new + partner, mask=m_channel, other=0.0).to(tl.float32)
    new_v = tl.load(p_new + G * D + channel, mask=m_channel, other=0.0)
    f = x.to(tl.float32)
    if HAS_Q_NORM:
        norm = tl.rsqrt(tl.sum(f * f, axis=1) / D + eps)[:, None]
        f = f * norm * q_weight[None, :]
        other = other * norm * q_other[None, :]
    if HAS_K_NORM:
        norm = tl.rsqrt(tl.sum(new * new, axis=0) / D + eps)
        new = new * norm * k_weight
        new_other = new_other * norm * k_other
    q = (f * cos[None, :] + other * sin[None, :]).to(x.dtype)
    new_k = (new * cos + new_other * sin).to(x.dtype)
    # All programs of a kv head know the new token; the last one keeps it.
    writes = m_channel & (channel < tl.where(last & (slot >= 0) & (length > 0), D, 0))
    p_slot = p_k + (slot // BLOCK_SIZE) * k_block_stride + (slot % BLOCK_SIZE) * k_slot_stride
    tl.store(p_slot + channel, new_k.to(p_k_cache.dtype.element_ty), mask=writes)
    p_slot = p_v + (slot // BLOCK_SIZE) * v_block_stride + (slot % BLOCK_SIZE) * v_slot_stride
    tl.store(p_slot + channel, new_v.to(p_v_cache.dtype.element_ty), mask=writes)

    own = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], axis=1)
    if HAS_SOFTCAP:
        own = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * scale / softcap * own) - 1.0)
    else:
        own = own * (scale * LOG2E)
    m = tl.where(last, own, float("-inf"))
    l = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.where(last, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    acc += tl.where(last, new_v.to(tl.float32), 0.0)[None, :]
    if start < stop:
        acc, m, l = _fold(acc, m, l, q, k, v, key, oldest, stop, scale, softcap, HAS_WINDOW, HAS_SOFTCAP, PRECISION)
    for first in tl.range(start + BLOCK_N, stop, BLOCK_N):
        block = ahead.to(tl.int64)
        following = first + BLOCK_N + tl.arange(0, BLOCK_N)
        ahead = tl.load(p_blocks + following // BLOCK_SIZE, mask=following < stop, other=0)
        key = first + tl.arange(0, BLOCK_N)
        place = key % BLOCK_SIZE
        k = tl.load(
            p_k + (block * k_block_stride + place * k_slot_stride)[None, :] + channel[:, None],
            mask=(key < stop)[None, :] & m_channel[:, None],
            other=0.0,
        )
        v = tl.load(
            p_v + (block * v_block_stride + place * v_slot_stride)[:, None] + channel[None, :],
            mask=(key < stop)[:, None] & m_channel[None, :],
            other=0.0,
        )
        acc, m, l = _fold(acc, m, l, q, k, v, key, oldest, stop, scale, softcap, HAS_WINDOW, HAS_SOFTCAP, PRECISION)
    acc = acc / l[:, None]
    if active == 1:
        p_rows = p_out + (line * H + head[:, None]) * D + channel[None, :]
        tl.store(p_rows, tl.where(length > 0, acc, 0.0).to(p_out.dtype.element_ty), mask=m_rows)
        return

    i_work = line * G + i_group
    row = tl.arange(0, ROWS)
    p_rows = p_out + (line * H + i_group * GROUP + row)[:, None] * D
    merge_splits(
        acc, m + tl.log2(l), p_partial, p_lse, p_arrived, p_rows, row < GROUP, i_work, i_split, splits, active,
        D, BLOCK_M, BLOCK_D, ROWS, SPLITS, MERGE,
    )  # fmt: skip
