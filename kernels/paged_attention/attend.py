# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005 (Triton knows no starred tuples)
"""The Triton kernel of paged attention: tiles of queries over split keys.

FlashAttention-2's tiles and online softmax (Dao 2023, arXiv:2307.08691) over a paged cache (Kwon et al. 2023,
arXiv:2309.06180); keys split over programs and merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023). All
query heads that share a kv head are rows of one tile (Ainslie et al. 2023, arXiv:2305.13245), so keys are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.paged_attention.splits import dealt_split, even_splits, fair_split_size

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _keys(
    acc,
    m,
    l,
    q,
    p_k,
    p_v,
    p_blocks,
    position,
    start,
    stop,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    scale,
    softcap,
    window,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Folds keys start … stop into (acc, m, l): m the largest score so far, in powers of two, l the sum of weights."""
    channel = tl.arange(0, BLOCK_D)
    value_channel = tl.arange(0, BLOCK_DV)
    # Blocks are looked up a tile ahead, so that the loads of keys and values wait for no other load.
    key = start + tl.arange(0, BLOCK_N)
    ahead = tl.load(p_blocks + key // BLOCK_SIZE, mask=key < stop, other=0)
    for first in tl.range(start, stop, BLOCK_N):
        block = ahead.to(tl.int64)
        key = first + BLOCK_N + tl.arange(0, BLOCK_N)
        ahead = tl.load(p_blocks + key // BLOCK_SIZE, mask=key < stop, other=0)
        key = first + tl.arange(0, BLOCK_N)
        m_key = key < stop
        place = key % BLOCK_SIZE
        p_keys = p_k + (block * k_block_stride + place * k_slot_stride)[None, :] + channel[:, None]
        p_values = p_v + (block * v_block_stride + place * v_slot_stride)[:, None] + value_channel[None, :]
        if IS_MASKED:
            k = tl.load(p_keys, mask=m_key[None, :] & (channel[:, None] < D), other=0.0)
        elif D == BLOCK_D:
            k = tl.load(p_keys)
        else:
            k = tl.load(p_keys, mask=channel[:, None] < D, other=0.0)
        s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        if HAS_SOFTCAP:
            s = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * scale / softcap * s) - 1.0)
            factor = 1.0
        else:
            factor = scale * LOG2E
        if IS_MASKED:
            seen = m_key[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1) * factor)
        if IS_MASKED:
            shift = tl.where(top == float("-inf"), 0.0, top)
        else:
            shift = top
        weight = tl.exp2(s * factor - shift[:, None])
        shrink = tl.exp2(m - shift)
        l = l * shrink + tl.sum(weight, axis=1)
        m = top
        if IS_MASKED:
            v = tl.load(p_values, mask=m_key[:, None] & (value_channel[None, :] < DV), other=0.0)
        elif DV == BLOCK_DV:
            v = tl.load(p_values)
        else:
            v = tl.load(p_values, mask=value_channel[None, :] < DV, other=0.0)
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return acc, m, l


@triton.jit
def _sum_tiles(
    p_sums,
    p_partials,
    active,
    m_value,
    ROWS: tl.constexpr,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """The sum of `active` partials, MERGE of them a tile, with the weights of all SPLITS worked out at once."""
    row = tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS)
    # The first partials are on their way while the weights of all are worked out.
    sums = tl.load(p_sums + split[:, None] * ROWS + row[None, :], mask=split[:, None] < active, other=float("-inf"))
    split = tl.arange(0, MERGE)
    some = tl.load(p_sums + split[:, None] * ROWS + row[None, :], mask=split[:, None] < active, other=float("-inf"))
    o = tl.load(
        p_partials[None, :, :] + split[:, None, None] * ROWS * DV,
        mask=(split[:, None, None] < active) & m_value[None, None, :],
        other=0.0,
    )
    top = tl.max(sums, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(sums - top[None, :]), axis=0)
    merged = tl.sum(o * tl.exp2(some - top[None, :])[:, :, None], axis=0)
    for first in tl.range(MERGE, active, MERGE):
        split = first + tl.arange(0, MERGE)
        some = tl.load(p_sums + split[:, None] * ROWS + row[None, :], mask=split[:, None] < active, other=float("-inf"))
        o = tl.load(
            p_partials[None, :, :] + split[:, None, None] * ROWS * DV,
            mask=(split[:, None, None] < active) & m_value[None, None, :],
            other=0.0,
        )
        merged += tl.sum(o * tl.exp2(some - top[None, :])[:, :, None], axis=0)
    return merged, total


@triton.jit
def _sum_near(
    p_sums,
    p_partials,
    active,
    m_value,
    ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DV: tl.constexpr,
    MERGE: tl.constexpr,
):
    """The sum of `active` partials, MERGE of them on their way at once: all lie alike, so no sum crosses threads."""
    row = tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    merged = tl.zeros([ROWS, BLOCK_DV], dtype=tl.float32)
    for first in tl.range(0, active, MERGE):
        sums = ()
        partials = ()
        for i in tl.static_range(MERGE):
            at = first + i
            live = row < tl.where(at < active, ROWS, 0)
            sums = sums + (tl.load(p_sums + at * ROWS + row, mask=live, other=float("-inf")),)
            partials = partials + (
                tl.load(p_partials + at * ROWS * DV, mask=live[:, None] & m_value[None, :], other=0.0),
            )
        highest = top
        for i in tl.static_range(MERGE):
            highest = tl.maximum(highest, sums[i])
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(top - shift)
        total = total * shrink
        merged = merged * shrink[:, None]
        for i in tl.static_range(MERGE):
            weight = tl.exp2(sums[i] - shift)
            total += weight
            merged += partials[i] * weight[:, None]
        top = highest
    return merged, total


@triton.jit
def merge_splits(
    acc,
    lse,
    p_partial,
    p_lse,
    p_arrived,
    p_rows,
    m_row,
    i_work,
    i_split,
    splits,
    active,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    IS_NEAR: tl.constexpr,
):
    """Keeps a split's result, acc [BLOCK_M, BLOCK_DV] with its log-sum-exp in powers of two, of which ROWS count.

    The last of `active` splits to arrive adds them all up and stores the rows of `m_row` at `p_rows` [ROWS, 1].
    """
    # Partial results in float32: [tile and kv head, split, row].
    rows = tl.arange(0, BLOCK_M)
    value_channel = tl.arange(0, BLOCK_DV)
    m_value = value_channel < DV
    p_mine = p_partial + ((i_work * splits + i_split) * ROWS + rows[:, None]) * DV + value_channel[None, :]
    kept = rows < ROWS
    tl.store(p_mine, acc, mask=kept[:, None] & m_value[None, :])
    tl.store(p_lse + (i_work * splits + i_split) * ROWS + rows, lse, mask=kept)
    tl.debug_barrier()
    if tl.atomic_add(p_arrived + i_work, 1, sem="acq_rel", scope="gpu") == active - 1:
        tl.store(p_arrived + i_work, 0)
        row = tl.arange(0, ROWS)
        p_sums = p_lse + i_work * splits * ROWS
        p_partials = p_partial + (i_work * splits * ROWS + row[:, None]) * DV + value_channel[None, :]
        if IS_NEAR:
            merged, total = _sum_near(p_sums, p_partials, active, m_value, ROWS, BLOCK_DV, DV, MERGE)
        else:
            merged, total = _sum_tiles(p_sums, p_partials, active, m_value, ROWS, DV, SPLITS, MERGE)
        merged = merged / tl.where(total > 0.0, total, 1.0)[:, None]
        stored = m_row[:, None] & m_value[None, :]
        tl.store(p_rows + value_channel[None, :], merged.to(p_rows.dtype.element_ty), mask=stored)


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "splits", "programs", "least"],
    do_not_specialize_on_alignment=["p_query_start", "p_context"],
)
def attend(
    p_q,
    p_k_cache,
    p_v_cache,
    p_table,
    p_query_start,
    p_context,
    p_sinks,
    p_out,
    p_partial,
    p_lse,
    p_arrived,
    q_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    table_stride,
    scale,
    softcap,
    window,
    v_scale,
    first_seq,
    num_seqs,
    splits,
    programs,
    least,
    H: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    IS_NEAR: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_DEALT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Lengths and tables are written before the first dependent launch of a step, so they are read without waiting.
    if PDL:
        gdc_launch_dependents()
    # Splits come last: those past a sequence's keys end at once and must not stand before any that has work.
    i_group = tl.program_id(1)
    i_split = tl.program_id(2)
    active = 1
    # The first query of a sequence reads the furthest keys.
    reach = window + BLOCK_Q - 1
    if IS_WHOLE:
        i_tile = tl.program_id(0)
        if IS_DEALT:
            # A sequence's heads stand side by side.
            i_group = tl.program_id(0)
            i_tile, i_split, active, split_size = dealt_split(
                p_context + first_seq, num_seqs, splits, programs, least, reach, tl.program_id(1), G, BLOCK_B, BLOCK_N,
                HAS_WINDOW,
            )  # fmt: skip
            if i_tile >= num_seqs:
                return
        seq = first_seq + i_tile
        query_first = seq
        count = 1
        if not IS_SINGLE:
            query_first = tl.load(p_query_start + seq)
            count = tl.load(p_query_start + seq + 1) - query_first
        tile_query = 0
    else:
        # Sequences start at tile floor(tokens before / BLOCK_Q) + sequences before: enough for each, found without a
        # list.
        i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
        origin = tl.load(p_query_start + first_seq)
        low = first_seq
        high = first_seq + num_seqs
        while high - low > 1:
            middle = (low + high) // 2
            if (tl.load(p_query_start + middle) - origin) // BLOCK_Q + middle - first_seq <= i_tile:
                low = middle
            else:
                high = middle
        seq = low
        query_first = tl.load(p_query_start + seq)
        count = tl.load(p_query_start + seq + 1) - query_first
        tile_query = (i_tile - (query_first - origin) // BLOCK_Q - (seq - first_seq)) * BLOCK_Q
        if tile_query >= count:
            if PDL:
                gdc_wait()
            return
    length = tl.load(p_context + seq)
    past = tl.maximum(length - count, 0)
    rows = tl.arange(0, BLOCK_M)
    query = tile_query + rows // GROUP
    head = i_group * GROUP + rows % GROUP
    m_rows = (rows < BLOCK_Q * GROUP) & (query < count)
    position = past + query

    stop = tl.minimum(length, past + tile_query + BLOCK_Q)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(past + tile_query - window + 1, 0) // BLOCK_N * BLOCK_N
    chunk = tl.maximum(stop - begin, 1)
    if SPLITS > 1:
        if not IS_DEALT:
            split_size = (chunk + splits - 1) // splits
            if IS_WHOLE:
                split_size = tl.maximum(
                    split_size,
                    fair_split_size(p_context + first_seq, num_seqs, reach, programs, G, BLOCK_B, HAS_WINDOW),
                )
            split_size, active = even_splits(chunk, tl.maximum(split_size, least), BLOCK_N)
            if i_split >= active:
                return
        chunk = split_size
    start = begin + i_split * chunk
    stop = tl.minimum(start + chunk, stop)

    channel = tl.arange(0, BLOCK_D)
    value_channel = tl.arange(0, BLOCK_DV)
    token = (query_first + query).to(tl.int64)
    if PDL:
        gdc_wait()
    q = tl.load(
        p_q + token[:, None] * q_stride + head[:, None] * D + channel[None, :],
        mask=m_rows[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        # A sink is one more key that carries no value: it opens the first split's sum.
        sink = tl.load(p_sinks + head, mask=m_rows, other=0.0).to(tl.float32) * LOG2E
        m = tl.where(i_split == 0, sink, m)
        l = tl.where(i_split == 0, 1.0, l)
    p_k = p_k_cache + i_group.to(tl.int64) * k_head_stride
    p_v = p_v_cache + i_group.to(tl.int64) * v_head_stride
    p_blocks = p_table + seq.to(tl.int64) * table_stride

    plain = start
    if not HAS_WINDOW and not IS_WHOLE:
        plain = tl.maximum(tl.minimum(stop, (past + tile_query + 1) // BLOCK_N * BLOCK_N), start)
        acc, m, l = _keys(
            acc,
            m,
            l,
            q,
            p_k,
            p_v,
            p_blocks,
            position,
            start,
            plain,
            k_block_stride,
            k_slot_stride,
            v_block_stride,
            v_slot_stride,
            scale,
            softcap,
            window,
            D=D,
            DV=DV,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            BLOCK_DV=BLOCK_DV,
            HAS_WINDOW=HAS_WINDOW,
            HAS_SOFTCAP=HAS_SOFTCAP,
            IS_MASKED=False,
            PRECISION=PRECISION,
        )
    acc, m, l = _keys(
        acc,
        m,
        l,
        q,
        p_k,
        p_v,
        p_blocks,
        position,
        plain,
        stop,
        k_block_stride,
        k_slot_stride,
        v_block_stride,
        v_slot_stride,
        scale,
        softcap,
        window,
        D=D,
        DV=DV,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        BLOCK_DV=BLOCK_DV,
        HAS_WINDOW=HAS_WINDOW,
        HAS_SOFTCAP=HAS_SOFTCAP,
        IS_MASKED=True,
        PRECISION=PRECISION,
    )
    acc = acc / tl.where(l > 0.0, l, 1.0)[:, None] * v_scale
    m_value = value_channel < DV
    p_rows = p_out + (token[:, None] * H + head[:, None]) * DV + value_channel[None, :]
    if active == 1:
        tl.store(p_rows, acc.to(p_out.dtype.element_ty), mask=m_rows[:, None] & m_value[None, :])
        return

    i_work = i_tile.to(tl.int64) * G + i_group
    row = tl.arange(0, ROWS)
    query = tile_query + row // GROUP
    head = i_group * GROUP + row % GROUP
    m_row = (row < BLOCK_Q * GROUP) & (query < count)
    p_rows = p_out + ((query_first + query).to(tl.int64) * H + head)[:, None] * DV
    merge_splits(
        acc, m + tl.log2(l), p_partial, p_lse, p_arrived, p_rows, m_row, i_work, i_split, splits, active,
        DV, BLOCK_M, BLOCK_DV, ROWS, SPLITS, MERGE, IS_NEAR,
    )  # fmt: skip
