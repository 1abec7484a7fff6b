"""Compressed key-value entries: one program a window that the step completes, then each line's state is brought up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _row(kv, gate, slot, p, first, lo, kv_stride, gate_stride, channels, dim, size, i):
    """kv and gate of the token at position p, from the step's inputs or from the state, in pairs of channels."""
    fresh = 2 * i < tl.where(p >= first, dim, 0)
    old = 2 * i < tl.where((p >= 0) & (p < first), dim, 0)
    token = lo + p - first
    place = slot + p % size * 2 * channels
    a = tl.load(kv + token * kv_stride + 2 * i, mask=fresh, other=0.0).to(tl.float32)
    b = tl.load(kv + token * kv_stride + 2 * i + 1, mask=fresh, other=0.0).to(tl.float32)
    ga = tl.load(gate + token * gate_stride + 2 * i, mask=fresh, other=0.0).to(tl.float32)
    gb = tl.load(gate + token * gate_stride + 2 * i + 1, mask=fresh, other=0.0).to(tl.float32)
    a += tl.load(place + 2 * i, mask=old, other=0.0).to(tl.float32)
    b += tl.load(place + 2 * i + 1, mask=old, other=0.0).to(tl.float32)
    ga += tl.load(place + channels + 2 * i, mask=old, other=0.0).to(tl.float32)
    gb += tl.load(place + channels + 2 * i + 1, mask=old, other=0.0).to(tl.float32)
    return a, b, ga, gb


@triton.jit(do_not_specialize=["first_line"])
def _compress(
    kv,
    gate,
    bias,
    norm,
    cos_sin,
    slots,
    cache,
    state,
    state_slots,
    query_start,
    context_len,
    first_line,
    eps,
    kv_stride,
    gate_stride,
    slot_stride,
    block_stride,
    entry_stride,
    per_block,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = first_line + tl.program_id(0)
    lo = tl.load(query_start + line).to(tl.int64)
    count = tl.load(query_start + line + 1) - lo
    length = tl.load(context_len + line).to(tl.int64)
    first = length - count
    w = first // RATIO + tl.program_id(1)
    if (count <= 0) | ((w + 1) * RATIO > length):
        return
    target = tl.load(slots + lo + (w + 1) * RATIO - 1 - first)
    if target < 0:
        return
    i = tl.arange(0, BLOCK)
    live = 2 * i < DIM
    slot = state + tl.load(state_slots + line) * slot_stride
    best_a = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_b = best_a
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = sum_a
    acc_a = sum_a
    acc_b = sum_a
    windows: tl.constexpr = CHANNELS // DIM
    for step in range(windows * RATIO):
        # The window before comes first and reads the first DIM channels; the window's own tokens read the last DIM.
        p = (w + 1) * RATIO - windows * RATIO + step
        shift = tl.where(step >= (windows - 1) * RATIO, CHANNELS - DIM, 0)
        if p >= 0:
            a, b, ga, gb = _row(
                kv + shift, gate + shift, slot + shift, p, first, lo, kv_stride, gate_stride, CHANNELS, DIM, SIZE, i
            )
            offset = bias + step % RATIO * CHANNELS + shift + 2 * i
            ga = tl.where(live, ga + tl.load(offset, mask=live, other=0.0).to(tl.float32), float("-inf"))
            gb = tl.where(live, gb + tl.load(offset + 1, mask=live, other=0.0).to(tl.float32), float("-inf"))
            top_a, top_b = tl.maximum(best_a, ga), tl.maximum(best_b, gb)
            calm_a = tl.where(top_a == float("-inf"), 0.0, top_a)
            calm_b = tl.where(top_b == float("-inf"), 0.0, top_b)
            fade_a, fade_b = tl.exp(best_a - calm_a), tl.exp(best_b - calm_b)
            e_a, e_b = tl.exp(ga - calm_a), tl.exp(gb - calm_b)
            sum_a, sum_b = sum_a * fade_a + e_a, sum_b * fade_b + e_b
            acc_a, acc_b = acc_a * fade_a + e_a * a, acc_b * fade_b + e_b * b
            best_a, best_b = top_a, top_b
    y_a = tl.where(live, acc_a / tl.where(live, sum_a, 1.0), 0.0)
    y_b = tl.where(live, acc_b / tl.where(live, sum_b, 1.0), 0.0)
    unit = tl.rsqrt((tl.sum(y_a * y_a, 0) + tl.sum(y_b * y_b, 0)) / DIM + eps)
    y_a = y_a * unit * tl.load(norm + 2 * i, mask=live, other=0.0).to(tl.float32)
    y_b = y_b * unit * tl.load(norm + 2 * i + 1, mask=live, other=0.0).to(tl.float32)
    plain: tl.constexpr = (DIM - ROPE) // 2
    angle = cos_sin + w * RATIO * ROPE + i - plain
    cos = tl.load(angle, mask=live & (i >= plain), other=1.0)
    sin = tl.load(angle + ROPE // 2, mask=live & (i >= plain), other=0.0)
    place = target // RATIO
    entry = cache + place // per_block * block_stride + place % per_block * entry_stride
    tl.store(entry + 2 * i, (y_a * cos - y_b * sin).to(cache.dtype.element_ty), mask=live)
    tl.store(entry + 2 * i + 1, (y_b * cos + y_a * sin).to(cache.dtype.element_ty), mask=live)


@triton.jit
def _keep(
    kv,
    gate,
    state,
    state_slots,
    query_start,
    context_len,
    kv_stride,
    gate_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0)
    lo = tl.load(query_start + line).to(tl.int64)
    count = tl.load(query_start + line + 1) - lo
    length = tl.load(context_len + line).to(tl.int64)
    # The latest position that this place of the ring holds.
    p = length - 1 - (length - 1 - tl.program_id(1) + SIZE) % SIZE
    first = length - count
    if (count <= 0) | (p < first):
        return
    i = tl.arange(0, BLOCK)
    token = lo + p - first
    place = state + tl.load(state_slots + line) * slot_stride + tl.program_id(1) * 2 * CHANNELS + i
    value = tl.load(kv + token * kv_stride + i, mask=i < CHANNELS, other=0.0)
    tl.store(place, value.to(state.dtype.element_ty), mask=i < CHANNELS)
    value = tl.load(gate + token * gate_stride + i, mask=i < CHANNELS, other=0.0)
    tl.store(place + CHANNELS, value.to(state.dtype.element_ty), mask=i < CHANNELS)


def compress_kv(
    kv: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    ratio: int,
    num_single: int,
    max_query: int,
    eps: float = 1e-6,
) -> None:
    """See the reference. A slot of the state and the last axis of every tensor are dense."""
    channels, dim = kv.shape[1], norm.shape[0]
    lines = context_len.shape[0]
    for first, count, longest in ((0, num_single, 1), (num_single, lines - num_single, max_query)):
        if count:
            _compress[(count, (longest + ratio - 1) // ratio)](
                kv,
                gate,
                bias,
                norm,
                cos_sin,
                slots,
                cache,
                state,
                state_slots,
                query_start,
                context_len,
                first,
                eps,
                kv.stride(0),
                gate.stride(0),
                state.stride(0),
                cache.stride(0),
                cache.stride(1),
                cache.shape[1],
                RATIO=ratio,
                CHANNELS=channels,
                DIM=dim,
                ROPE=cos_sin.shape[1],
                SIZE=state.shape[1],
                BLOCK=triton.next_power_of_2(dim // 2),
                num_warps=2,
            )
    if lines:
        _keep[(lines, state.shape[1])](
            kv,
            gate,
            state,
            state_slots,
            query_start,
            context_len,
            kv.stride(0),
            gate.stride(0),
            state.stride(0),
            CHANNELS=channels,
            SIZE=state.shape[1],
            BLOCK=triton.next_power_of_2(channels),
            num_warps=2,
        )
