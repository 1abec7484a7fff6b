# mypy: disable-error-code="no-untyped-def,assignment,misc,index"
# ruff: noqa: RUF005 (Triton knows no starred tuples)
"""The Triton kernel for sequences of one new token: norm, rotation and KV write in the prologue of attention.

A program owns a kv head of a sequence, or a split of its keys. What the sequence has cached was written by earlier
steps, so the first AHEAD tiles of keys and values are on their way before the wait for the kernel that computes q, k
and v; a split that they cover pays for no loop's start. The new token's key is a row of the queries' tile, below them:
it is normed and turned with them, and no vector changes its layout through shared memory. It is attended to from
registers, by the program of the last split, which also writes it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_numbers import to_cache
from kernels.paged_attention.attend import LOG2E, merge_splits
from kernels.paged_attention.splits import even_splits, fair_split_size

# Keys that splits come in multiples of.
GRAIN = tl.constexpr(32)


@triton.jit
def _blocks(p_blocks, first, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cache's blocks of BLOCK_N keys from position `first` on, 0 from `stop` on."""
    key = first + tl.arange(0, BLOCK_N)
    return tl.load(p_blocks + key // BLOCK_SIZE, mask=key < stop, other=0)


@triton.jit
def _tile(
    p_k,
    p_v,
    blocks,
    first,
    stop,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys [BLOCK_D, BLOCK_N] and values [BLOCK_N, BLOCK_D] from position `first` on, zero from `stop` on."""
    channel = tl.arange(0, BLOCK_D)
    m_channel = channel < D
    key = first + tl.arange(0, BLOCK_N)
    block = blocks.to(tl.int64)
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
    return k, v


@triton.jit
def _fold(
    acc,
    m,
    l,
    q,
    k,
    v,
    first,
    stop,
    scale,
    softcap,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of cached keys. m is finite afterwards if it was before, or if the tile holds a key."""
    key = first + tl.arange(0, BLOCK_N)
    s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
    if HAS_SOFTCAP:
        s = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * scale / softcap * s) - 1.0)
    else:
        s = s * (scale * LOG2E)
    s = tl.where((key < stop)[None, :], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    weight = tl.exp2(s - top[:, None])
    shrink = tl.exp2(m - top)
    l = l * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return acc, top, l


@triton.jit(
    do_not_specialize=["num_seqs", "splits", "programs", "least"],
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
    k_inverse,
    v_inverse,
    v_scale,
    num_seqs,
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
    AHEAD: tl.constexpr,
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
    seq = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    i_split = tl.program_id(2)
    length = tl.load(p_context + seq)
    angle = tl.load(p_positions + seq).to(tl.int64)
    slot = tl.load(p_slots + seq).to(tl.int64)
    past = tl.maximum(length - 1, 0)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - window, 0)
    chunk = tl.maximum(past - begin, 1)
    active = 1
    if SPLITS > 1:
        split_size = (chunk + splits - 1) // splits
        if BLOCK_B > 1:
            split_size = tl.maximum(
                split_size, fair_split_size(p_context, num_seqs, window, programs, G, BLOCK_B, HAS_WINDOW)
            )
        split_size, active = even_splits(chunk, tl.maximum(split_size, least), GRAIN)
        if i_split >= active:
            return
        chunk = split_size
    start = begin + i_split * chunk
    stop = tl.minimum(start + chunk, past)
    last = i_split == active - 1

    p_k = p_k_cache + i_group.to(tl.int64) * k_head_stride
    p_v = p_v_cache + i_group.to(tl.int64) * v_head_stride
    p_blocks = p_table + seq * table_stride
    following = start + AHEAD * BLOCK_N
    blocks = ()
    for i in tl.static_range(AHEAD):
        blocks = blocks + (_blocks(p_blocks, start + i * BLOCK_N, stop, BLOCK_SIZE, BLOCK_N),)
    ahead = _blocks(p_blocks, following, stop, BLOCK_SIZE, BLOCK_N)
    keys = ()
    values = ()
    for i in tl.static_range(AHEAD):
        k, v = _tile(
            p_k, p_v, blocks[i], start + i * BLOCK_N, stop, k_block_stride, k_slot_stride, v_block_stride,
            v_slot_stride, D, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        keys = keys + (k,)
        values = values + (v,)

    # Rows of the tile: the group's queries, then the new key. Everything of a row's channels is loaded once for each
    # row, in the layout of the tile. A channel turns with its partner: y = x·cos + partner·sin, sin negative for the
    # first of a pair.
    channel = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    turns = channel < R
    if IS_INTERLEAVED:
        pair = channel // 2
        is_first = channel % 2 == 0
        partner = tl.where(turns, tl.where(is_first, channel + 1, channel - 1), channel)
    else:
        is_first = channel < R // 2
        pair = tl.where(is_first, channel, channel - R // 2)
        partner = tl.where(turns, tl.where(is_first, channel + R // 2, channel - R // 2), channel)
    is_query = (rows < GROUP)[:, None] & (channel < D)[None, :]
    is_key = (rows == GROUP)[:, None] & (channel < D)[None, :]
    turned = (rows <= GROUP)[:, None] & turns[None, :]
    p_angle = p_cos_sin + angle * R + 0 * rows[:, None] + pair[None, :]
    cos = tl.load(p_angle, mask=turned, other=1.0)
    sin = tl.load(p_angle + R // 2, mask=turned, other=0.0)
    sin = tl.where(is_first[None, :], -sin, sin)
    own_channel = 0 * rows[:, None] + channel[None, :]
    its_partner = 0 * rows[:, None] + partner[None, :]
    # The norms' weights are in cos and sin: y = norm·(x·(weight·cos) + partner·(weight of the partner·sin)).
    if HAS_Q_NORM:
        weight = tl.load(p_q_norm + own_channel, mask=is_query, other=0.0).to(tl.float32) + offset
        its_weight = tl.load(p_q_norm + its_partner, mask=is_query, other=0.0).to(tl.float32) + offset
        cos = tl.where(is_query, cos * weight, cos)
        sin = tl.where(is_query, sin * its_weight, sin)
    if HAS_K_NORM:
        weight = tl.load(p_k_norm + own_channel, mask=is_key, other=0.0).to(tl.float32) + offset
        its_weight = tl.load(p_k_norm + its_partner, mask=is_key, other=0.0).to(tl.float32) + offset
        cos = tl.where(is_key, cos * weight, cos)
        sin = tl.where(is_key, sin * its_weight, sin)
    head = tl.where(rows < GROUP, i_group * GROUP + rows, H + i_group)
    if PDL:
        gdc_wait()

    p_mine = p_qkv + seq * qkv_stride
    x = tl.load(p_mine + head[:, None] * D + channel[None, :], mask=is_query | is_key, other=0.0)
    other = tl.load(p_mine + head[:, None] * D + partner[None, :], mask=is_query | is_key, other=0.0).to(tl.float32)
    new_v = tl.load(p_mine + (H + G + i_group) * D + channel, mask=channel < D, other=0.0)
    f = x.to(tl.float32)
    y = f * cos + other * sin
    if HAS_Q_NORM or HAS_K_NORM:
        norm = tl.rsqrt(tl.sum(f * f, axis=1) / D + eps)
        if not HAS_K_NORM:
            norm = tl.where(rows < GROUP, norm, 1.0)
        if not HAS_Q_NORM:
            norm = tl.where(rows == GROUP, norm, 1.0)
        y = y * norm[:, None]
    q = y.to(x.dtype)
    # All programs of a kv head know the new token; the last one keeps it, and all attend to what it keeps.
    kept = to_cache(q, k_inverse, p_k_cache.dtype.element_ty)
    kept_v = to_cache(new_v, v_inverse, p_v_cache.dtype.element_ty)
    written = channel < tl.where(last & (slot >= 0) & (length > 0), D, 0)
    p_slot = p_k + (slot // BLOCK_SIZE) * k_block_stride + (slot % BLOCK_SIZE) * k_slot_stride
    tl.store(p_slot + own_channel, kept, mask=is_key & written[None, :])
    p_slot = p_v + (slot // BLOCK_SIZE) * v_block_stride + (slot % BLOCK_SIZE) * v_slot_stride
    tl.store(p_slot + channel, kept_v, mask=written)

    turned_q = q.to(tl.float32)
    new_k = tl.sum(tl.where(is_key, kept.to(tl.float32), 0.0), axis=0)
    own = tl.sum(turned_q * new_k[None, :], axis=1)
    if HAS_SOFTCAP:
        own = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * scale / softcap * own) - 1.0)
    else:
        own = own * (scale * LOG2E)
    m = tl.where(last, own, float("-inf"))
    l = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.where(last, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    acc += tl.where(last, kept_v.to(tl.float32), 0.0)[None, :]
    acc, m, l = _fold(
        acc, m, l, q, keys[0], values[0], start, stop, scale, softcap,
        BLOCK_N, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    for i in tl.static_range(1, AHEAD):
        if start + i * BLOCK_N < stop:
            acc, m, l = _fold(
                acc, m, l, q, keys[i], values[i], start + i * BLOCK_N, stop, scale, softcap,
                BLOCK_N, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip
    if following < stop:
        for first in tl.range(following, stop, BLOCK_N):
            now = ahead
            ahead = _blocks(p_blocks, first + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N)
            k, v = _tile(
                p_k, p_v, now, first, stop, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
                D, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            acc, m, l = _fold(
                acc, m, l, q, k, v, first, stop, scale, softcap,
                BLOCK_N, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip
    acc = acc / l[:, None] * v_scale
    if active == 1:
        p_rows = p_out + (seq * H + head[:, None]) * D + channel[None, :]
        tl.store(p_rows, tl.where(length > 0, acc, 0.0).to(p_out.dtype.element_ty), mask=is_query)
        return

    i_work = seq * G + i_group
    row = tl.arange(0, ROWS)
    p_rows = p_out + (seq * H + i_group * GROUP + row)[:, None] * D
    merge_splits(
        acc, m + tl.log2(l), p_partial, p_lse, p_arrived, p_rows, row < GROUP, i_work, i_split, splits, active,
        D, BLOCK_M, BLOCK_D, ROWS, SPLITS, MERGE, True,
    )  # fmt: skip
