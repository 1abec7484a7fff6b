"""Depthwise causal convolution: every token is independent, then each line's state takes its last inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _input(x, slot, c, source, lo, past, channels, x_stride, WIDTH: tl.constexpr):
    """Input `source` of the line; those before its first token are places of the state, the latest last."""
    fresh = tl.where(source >= 0, channels, 0)
    old = tl.where((source < 0) & past, channels, 0)
    v = tl.load(x + (lo + source) * x_stride + c, mask=c < fresh, other=0.0).to(tl.float32)
    return v + tl.load(slot + (WIDTH - 1 + source) * channels + c, mask=c < old, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first_line"])
def _conv(
    x,
    weight,
    state,
    state_slots,
    query_start,
    context_len,
    out,
    first_line,
    channels,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    UPDATE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    line = first_line + tl.program_id(0)
    lo = tl.load(query_start + line).to(tl.int64)
    count = tl.load(query_start + line + 1) - lo
    query = tl.program_id(1) * QUERIES
    if query >= count:
        return
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = c < channels
    past = tl.load(context_len + line) > count
    slot = state + tl.load(state_slots + line) * slot_stride
    for q in range(query, tl.minimum(query + QUERIES, count)):
        y = tl.zeros((BLOCK_C,), tl.float32)
        for w in tl.static_range(WIDTH):
            source = q - (WIDTH - 1) + w
            v = _input(x, slot, c, source, lo, past, channels, x_stride, WIDTH)
            y += v * tl.load(weight + c * WIDTH + w, mask=live, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y))
        tl.store(out + (lo + q) * channels + c, y.to(out.dtype.element_ty), mask=live)
    if UPDATE:
        _keep(x, slot, c, live, lo, count, past, channels, x_stride, WIDTH)


@triton.jit
def _keep(x, slot, c, live, lo, count, past, channels, x_stride, WIDTH: tl.constexpr):
    for w in tl.static_range(WIDTH - 1):
        # Rising places: a place is read, at most, as the source of an earlier one before it is written.
        source = count - (WIDTH - 1) + w
        v = _input(x, slot, c, source, lo, past, channels, x_stride, WIDTH)
        tl.store(slot + w * channels + c, v.to(slot.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["first_line"])
def _update(
    x,
    state,
    state_slots,
    query_start,
    context_len,
    first_line,
    channels,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    line = first_line + tl.program_id(0)
    lo = tl.load(query_start + line).to(tl.int64)
    count = tl.load(query_start + line + 1) - lo
    if count <= 0:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    past = tl.load(context_len + line) > count
    slot = state + tl.load(state_slots + line) * slot_stride
    _keep(x, slot, c, c < channels, lo, count, past, channels, x_stride, WIDTH)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_single: int,
    max_query: int,
) -> torch.Tensor:
    """See the reference. The channels of x and the places of a slot are dense."""
    channels, width = weight.shape
    lines = context_len.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = 512
    parts = triton.cdiv(channels, block)
    common = (channels, x.stride(0), state.stride(0))
    if num_single:
        _conv[(num_single, 1, parts)](
            x,
            weight,
            state,
            state_slots,
            query_start,
            context_len,
            out,
            0,
            *common,
            WIDTH=width,
            QUERIES=1,
            UPDATE=True,
            BLOCK_C=block,
        )
    if lines > num_single:
        many = lines - num_single
        _conv[(many, triton.cdiv(max_query, 8), parts)](
            x,
            weight,
            state,
            state_slots,
            query_start,
            context_len,
            out,
            num_single,
            *common,
            WIDTH=width,
            QUERIES=8,
            UPDATE=False,
            BLOCK_C=block,
        )
        _update[(many, parts)](
            x, state, state_slots, query_start, context_len, num_single, *common, WIDTH=width, BLOCK_C=block
        )
    return out
