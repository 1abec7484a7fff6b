"""Depthwise causal convolution: a program takes some tokens of a sequence and some channels; the one with a sequence's
first tokens brings its state up too, since no other reads it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import AttentionBatch
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

BLOCK_C, QUERIES, WARPS = 256, 16, 4


@triton.jit
def taps(weight, c, live, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """The filter of each channel, [C, BLOCK_W] float32: the taps of a channel stand together."""
    w = tl.arange(0, BLOCK_W)
    return tl.load(weight + c[:, None] * WIDTH + w[None], mask=live[:, None] & (w < WIDTH)[None], other=0.0).to(
        tl.float32
    )


@triton.jit
def tap(filters, w, BLOCK_W: tl.constexpr):
    """Tap `w` of each channel."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_W)[None] == w, filters, 0.0), 1)


@triton.jit(
    do_not_specialize=["first_seq"],
    do_not_specialize_on_alignment=["state_slots", "query_start", "context_len"],
)
def _conv(
    x,
    weight,
    state,
    state_slots,
    query_start,
    context_len,
    out,
    first_seq,
    channels,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    seq = first_seq + tl.program_id(2)
    lo = tl.load(query_start + seq).to(tl.int64)
    count = tl.load(query_start + seq + 1) - lo
    begin = tl.program_id(1) * QUERIES
    if begin >= count:
        return
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = c < channels
    first = tl.load(context_len + seq) - count
    slot = state + tl.load(state_slots + seq) * slot_stride
    row = x + lo * x_stride
    q = begin + tl.arange(0, QUERIES)
    inside = (q < count)[:, None] & live[None]
    filters = taps(weight, c, live, WIDTH, BLOCK_W)
    if PDL:
        gdc_wait()
    y = tl.zeros((QUERIES, BLOCK_C), tl.float32)
    for w in tl.static_range(WIDTH):
        source = q - (WIDTH - 1) + w
        v = tl.load(row + source[:, None] * x_stride + c[None], mask=inside & (source >= 0)[:, None], other=0.0)
        # Taps are added in their order wherever chunks begin: kept inputs are those of a chunk's first tokens alone.
        position = first + source
        held = inside & ((source < 0) & (position >= 0))[:, None]
        old = tl.load(slot + ((position + PLACES) % PLACES)[:, None] * channels + c[None], mask=held, other=0.0)
        y += (v.to(tl.float32) + old.to(tl.float32)) * tap(filters, w, BLOCK_W)[None]
    if begin == 0:
        # every thread has read the state before any writes to it
        tl.debug_barrier()
        for w in tl.static_range(PLACES):
            last = count - PLACES + w
            fresh = c < tl.where(last >= 0, channels, 0)
            v_last = tl.load(row + last * x_stride + c, mask=fresh, other=0.0)
            place = slot + (first + last + PLACES) % PLACES * channels
            tl.store(place + c, v_last.to(state.dtype.element_ty), mask=fresh)
    y = y / (1.0 + tl.exp(-y))
    tl.store(out + (lo + q)[:, None] * channels + c[None], y.to(out.dtype.element_ty), mask=inside)


def conv_seqs(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    first: int,
    stop: int,
    longest: int,
    deterministic: bool = False,
) -> None:
    """Sequences first … stop − 1 of the op, each of at most `longest` tokens, into their rows of `out`."""
    channels, width = weight.shape
    queries = 1 if longest == 1 and not deterministic else max(QUERIES, next_power_of_2(width - 1))
    pdl = workspace.pdl
    workspace.launch(_conv, (cdiv(channels, BLOCK_C), cdiv(longest, queries), stop - first))(
        x,
        weight,
        state,
        state_slots,
        query_start,
        context_len,
        out,
        first,
        channels,
        x.stride(0),
        state.stride(0),
        WIDTH=width,
        PLACES=state.shape[1],
        BLOCK_W=next_power_of_2(width),
        QUERIES=queries,
        BLOCK_C=BLOCK_C,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=WARPS,
    )


def causal_conv(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    deterministic: bool = False,
) -> torch.Tensor:
    """See the reference. The channels of x and the places of a slot are dense."""
    num_single = batch.num_single
    seqs = batch.context_len.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    alone = 0 if deterministic or batch.num_kept is not None else num_single
    for first, stop, longest in ((0, alone, 1), (alone, seqs, batch.max_query)):
        if stop > first:
            given = (x, weight, state, state_slots, batch.query_start, batch.context_len, out)
            conv_seqs(workspace, *given, first, stop, longest, deterministic)
    return out
