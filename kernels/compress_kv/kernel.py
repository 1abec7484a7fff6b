# mypy: disable-error-code="no-untyped-def"
"""Compressed key-value entries: one program a window that the step completes, by tiles of its tokens; then each
sequence's state is brought up, in the same launch where a sequence has one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import AttentionBatch
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

TOKENS = 32


@triton.jit
def _tile(
    values, p, first, slot, lo, stride, shift, part, m_fresh, m_old, i, CHANNELS: tl.constexpr, SIZE: tl.constexpr
):
    """Values (part 0) or gates (part 1) of the tokens at positions p, from the step's inputs or from the state."""
    fresh = tl.load(values + (lo + p - first)[:, None] * stride + shift + i[None], mask=m_fresh, other=0.0)
    place = slot + (p % SIZE)[:, None] * 2 * CHANNELS + part * CHANNELS + shift + i[None]
    return fresh.to(tl.float32) + tl.load(place, mask=m_old, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["first_seq"],
    do_not_specialize_on_alignment=["slots", "state_slots", "query_start", "context_len"],
)
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
    first_seq,
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
    TOKENS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    seq = first_seq + tl.program_id(0)
    lo = tl.load(query_start + seq).to(tl.int64)
    count = tl.load(query_start + seq + 1) - lo
    length = tl.load(context_len + seq).to(tl.int64)
    first = length - count
    w = first // RATIO + tl.program_id(1)
    slot = state + tl.load(state_slots + seq) * slot_stride
    if PDL:
        gdc_wait()
    if KEEP:
        # The place of a sequence's one token is read by no one: the windows that it closes take the token itself.
        c = tl.arange(0, BLOCK_C)
        place = slot + first % SIZE * 2 * CHANNELS + c
        value = tl.load(kv + lo * kv_stride + c, mask=c < CHANNELS, other=0.0)
        tl.store(place, value.to(state.dtype.element_ty), mask=c < CHANNELS)
        value = tl.load(gate + lo * gate_stride + c, mask=c < CHANNELS, other=0.0)
        tl.store(place + CHANNELS, value.to(state.dtype.element_ty), mask=c < CHANNELS)
    if (count <= 0) | ((w + 1) * RATIO > length):
        return
    target = tl.load(slots + lo + (w + 1) * RATIO - 1 - first)
    if target < 0:
        return
    i = tl.arange(0, BLOCK)
    n = tl.arange(0, TOKENS)
    live = i < DIM
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK,), tl.float32)
    windows: tl.constexpr = CHANNELS // DIM
    for begin in range(0, windows * RATIO, TOKENS):
        # The window before comes first and reads the first DIM channels; the window's own tokens read the last DIM.
        step = begin + n
        p = (w + 1) * RATIO - windows * RATIO + step
        shift = tl.where(step >= (windows - 1) * RATIO, CHANNELS - DIM, 0)[:, None]
        there = (step < windows * RATIO) & (p >= 0)
        m_fresh = (there & (p >= first))[:, None] & live[None]
        m_old = (there & (p < first))[:, None] & live[None]
        v = _tile(kv, p, first, slot, lo, kv_stride, shift, 0, m_fresh, m_old, i, CHANNELS, SIZE)
        g = _tile(gate, p, first, slot, lo, gate_stride, shift, 1, m_fresh, m_old, i, CHANNELS, SIZE)
        inside = there[:, None] & live[None]
        offset = bias + (step % RATIO)[:, None] * CHANNELS + shift + i[None]
        g = tl.where(inside, g + tl.load(offset, mask=inside, other=0.0).to(tl.float32), float("-inf"))
        top = tl.maximum(best, tl.max(g, 0))
        calm = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp(best - calm)
        e = tl.exp(g - calm[None])
        total = total * fade + tl.sum(e, 0)
        acc = acc * fade + tl.sum(e * v, 0)
        best = top
    y = tl.where(live, acc / tl.where(live, total, 1.0), 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / DIM + eps) * tl.load(norm + i, mask=live, other=0.0).to(tl.float32)
    # Channels as pairs (2i, 2i + 1); those before the rotated ones turn by no angle.
    a, b = tl.split(tl.reshape(y, (BLOCK // 2, 2)))
    j = tl.arange(0, BLOCK // 2)
    plain: tl.constexpr = (DIM - ROPE) // 2
    turned = (2 * j < DIM) & (j >= plain)
    angle = cos_sin + w * RATIO * ROPE + j - plain
    cos = tl.load(angle, mask=turned, other=1.0)
    sin = tl.load(angle + ROPE // 2, mask=turned, other=0.0)
    y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK,))
    place_e = target // RATIO
    entry = cache + place_e // per_block * block_stride + place_e % per_block * entry_stride
    tl.store(entry + i, y.to(cache.dtype.element_ty), mask=live)


@triton.jit(
    do_not_specialize=["first_seq"], do_not_specialize_on_alignment=["state_slots", "query_start", "context_len"]
)
def _keep(
    kv,
    gate,
    state,
    state_slots,
    query_start,
    context_len,
    first_seq,
    kv_stride,
    gate_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    seq = first_seq + tl.program_id(0)
    lo = tl.load(query_start + seq).to(tl.int64)
    count = tl.load(query_start + seq + 1) - lo
    length = tl.load(context_len + seq).to(tl.int64)
    # The latest position that this place of the ring holds.
    p = length - 1 - (length - 1 - tl.program_id(1) + SIZE) % SIZE
    first = length - count
    if PDL:
        gdc_wait()
    if (count <= 0) | (p < first):
        return
    i = tl.arange(0, BLOCK)
    token = lo + p - first
    place = state + tl.load(state_slots + seq) * slot_stride + tl.program_id(1) * 2 * CHANNELS + i
    value = tl.load(kv + token * kv_stride + i, mask=i < CHANNELS, other=0.0)
    tl.store(place, value.to(state.dtype.element_ty), mask=i < CHANNELS)
    value = tl.load(gate + token * gate_stride + i, mask=i < CHANNELS, other=0.0)
    tl.store(place + CHANNELS, value.to(state.dtype.element_ty), mask=i < CHANNELS)


def compress_kv(
    workspace: Workspace,
    kv: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    ratio: int,
    eps: float = 1e-6,
    deterministic: bool = False,
) -> None:
    """See the reference. A slot of the state and the last axis of every tensor are dense."""
    num_single = batch.num_single
    channels, dim = kv.shape[1], norm.shape[0]
    seqs, size = batch.context_len.shape[0], state.shape[1]
    pdl = workspace.pdl
    strides = (kv.stride(0), gate.stride(0), state.stride(0))
    alone = 0 if deterministic else num_single
    for first, count, longest, single in ((0, alone, 1, True), (alone, seqs - alone, batch.max_query, False)):
        if not count:
            continue
        workspace.launch(_compress, (count, 1 if single else cdiv(longest + ratio - 1, ratio)))(
            kv,
            gate,
            bias,
            norm,
            cos_sin,
            slots,
            cache,
            state,
            state_slots,
            batch.query_start,
            batch.context_len,
            first,
            eps,
            *strides,
            cache.stride(0),
            cache.stride(1),
            cache.shape[1],
            RATIO=ratio,
            CHANNELS=channels,
            DIM=dim,
            ROPE=cos_sin.shape[1],
            SIZE=size,
            TOKENS=min(TOKENS, next_power_of_2(channels // dim * ratio)),
            KEEP=single,
            BLOCK=next_power_of_2(dim),
            BLOCK_C=next_power_of_2(channels),
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=8 if channels // dim * ratio > 8 else 4,
        )
        if not single:
            workspace.launch(_keep, (count, size))(
                kv,
                gate,
                state,
                state_slots,
                batch.query_start,
                batch.context_len,
                first,
                *strides,
                CHANNELS=channels,
                SIZE=size,
                BLOCK=next_power_of_2(channels),
                PDL=pdl,
                launch_pdl=pdl,
                num_warps=2,
            )
