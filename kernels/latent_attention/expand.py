# mypy: disable-error-code="no-untyped-def"
"""Sequences of many queries: their latents are taken through the up-projection once, then each head attends to its own
keys and values, which are a third as wide as the latents. The host has to know how many entries there are at most, no
more, so that graphs hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.cache_scales import LatentViews
from kernels.hardware import shared_bytes
from kernels.latent_attention.prompt import attend_prompts
from kernels.latent_attention.up import ENTRIES, SEQS, expand
from kernels.pipeline import fitting_stages
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tile:
    """How attention is cut: queries and keys a tile, pipeline depth, warps."""

    queries: int
    keys: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class UpTile:
    """How the up-projection is cut: entries of a sequence, outputs and latent channels a tile, pipeline depth,
    warps."""

    entries: int
    outputs: int
    channels: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["first_seq", "num_seqs"], do_not_specialize_on_alignment=["context_len"])
def _expand(
    cache,
    keys,
    kv_up,
    block_table,
    context_len,
    kv,
    rotated,
    latent_scale,
    table_stride,
    block_stride,
    entry_stride,
    key_block_stride,
    key_stride,
    first_seq,
    num_seqs,
    OUTPUTS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """kv = latents · kv_upᵀ for ROWS entries of a sequence, whose rotated keys are copied beside. Sequences stand one
    after another, each filled up to whole tiles."""
    tile = tl.program_id(1)
    seqs = tl.arange(0, BLOCK_B)
    upto = tl.cumsum(tl.cdiv(tl.load(context_len + first_seq + seqs, mask=seqs < num_seqs, other=0), ROWS), 0)
    before = (upto <= tile) & (seqs < num_seqs)
    i_seq = tl.sum(before.to(tl.int32), 0)
    if i_seq >= num_seqs:
        return
    seq = (first_seq + i_seq).to(tl.int64)
    length = tl.load(context_len + seq)
    row = tl.arange(0, ROWS)
    j = (tile - tl.max(tl.where(before, upto, 0), 0)) * ROWS + row
    held = (j < length)[:, None]
    block = tl.load(block_table + seq * table_stride + j // BLOCK_SIZE, mask=j < length, other=0).to(tl.int64)
    entry = cache + (block * block_stride + j % BLOCK_SIZE * entry_stride)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    first_output = tl.program_id(0) * BLOCK_O
    acc = tl.zeros((ROWS, BLOCK_O), tl.float32)
    for first in tl.range(0, LATENT, BLOCK_C, num_stages=STAGES):
        w = kv_up.load([first_output, first])
        latent = tl.load(entry + first + c, mask=held & (first + c < LATENT), other=0.0)
        acc = tl.dot(latent.to(w.dtype), w.T, acc, input_precision=PRECISION)
    if cache.dtype != keys.dtype:
        acc = acc * latent_scale
    o = first_output + tl.arange(0, BLOCK_O)[None, :]
    place = (tile.to(tl.int64) * ROWS + row)[:, None]
    tl.store(kv + place * OUTPUTS + o, acc.to(kv.dtype.element_ty), mask=o < OUTPUTS)
    if tl.program_id(0) == 0:
        r = tl.arange(0, ROPE)[None, :]
        key = keys + (block * key_block_stride + j % BLOCK_SIZE * key_stride)[:, None]
        tl.store(rotated + place * ROPE + r, tl.load(key + r, mask=held, other=0.0))


@triton.jit
def _rows_before(context_len, first_seq, i_seq, ROWS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Where the entries of sequence `i_seq` begin among those that `_expand` wrote."""
    seq = tl.arange(0, BLOCK_B)
    return tl.sum(tl.cdiv(tl.load(context_len + first_seq + seq, mask=seq < i_seq, other=0), ROWS), 0) * ROWS


@triton.jit
def _fold(
    acc,
    m,
    l,
    qn,
    qr,
    keys,
    values,
    rotated,
    row,
    column,
    position,
    start,
    stop,
    scale,
    NOPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for first in tl.range(start, stop, BLOCK_N):
        k = keys.load([row + first, column])
        r = rotated.load([row + first, 0])
        s = tl.dot(qn, k.T, input_precision=PRECISION)
        s = tl.dot(qr, r.T, s, input_precision=PRECISION)
        if MASKED:
            s = tl.where((first + tl.arange(0, BLOCK_N))[None, :] <= position[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
        w = tl.exp2(s * (scale * LOG2E) - top[:, None])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(w, 1)
        v = values.load([row + first, column + NOPE])
        acc = tl.dot(w.to(qn.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m = top
    return acc, m, l


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs"],
    do_not_specialize_on_alignment=["query_start", "context_len"],
)
def _attend(
    q,
    keys,
    values,
    rotated,
    query_start,
    context_len,
    out,
    q_token_stride,
    q_head_stride,
    scale,
    first_seq,
    num_seqs,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of a sequence's queries, one head, over all keys that they see."""
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    origin = tl.load(query_start + first_seq)
    seqs = tl.arange(0, BLOCK_B)
    starts = tl.load(query_start + first_seq + seqs, mask=seqs < num_seqs, other=1 << 30)
    begun = (starts - origin) // BLOCK_M + seqs <= i_tile
    i_seq = tl.sum(begun.to(tl.int32), 0) - 1
    seq = first_seq + i_seq
    query_first = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - query_first
    first_query = (i_tile - (query_first - origin) // BLOCK_M - i_seq) * BLOCK_M
    if first_query >= count:
        return
    length = tl.load(context_len + seq)
    past = length - count
    query = first_query + tl.arange(0, BLOCK_M)
    live = (query < count)[:, None]
    token = (query_first + query).to(tl.int64)
    own = q + token[:, None] * q_token_stride + head * q_head_stride
    qn = tl.load(own + tl.arange(0, NOPE)[None, :], mask=live, other=0.0)
    qr = tl.load(own + NOPE + tl.arange(0, ROPE)[None, :], mask=live, other=0.0)
    acc = tl.zeros((BLOCK_M, VALUE), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    stop = tl.minimum(length, past + first_query + BLOCK_M)
    plain = tl.minimum((past + first_query + 1) // BLOCK_N * BLOCK_N, stop)
    row = _rows_before(context_len, first_seq, i_seq, ROWS, BLOCK_B)
    column = head * (NOPE + VALUE)
    acc, m, l = _fold(
        acc, m, l, qn, qr, keys, values, rotated, row, column, past + query, 0, plain, scale, NOPE, BLOCK_N,
        False, PRECISION,
    )  # fmt: skip
    acc, m, l = _fold(
        acc, m, l, qn, qr, keys, values, rotated, row, column, past + query, plain, stop, scale, NOPE, BLOCK_N,
        True, PRECISION,
    )  # fmt: skip
    acc = acc / l[:, None]
    place = (token[:, None] * HEADS + head) * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=live)


def attend_expanded(
    workspace: Workspace,
    q: torch.Tensor,
    kv_up: torch.Tensor,
    cache: torch.Tensor,
    held: LatentViews,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    first_seq: int,
    max_query: int,
    max_total_context: int,
    up: UpTile | None,
    tile: Tile | None,
) -> None:
    """`latent_attention` of the sequences from `first_seq` on, whose tokens start there too, written into `out`.

    They have at most `max_query` queries each and `max_total_context` tokens in the cache, of which `held` are the
    parts. The parts of a head are powers of two from 16 on; up.entries is a multiple of tile.keys. No cut: what Hopper
    has for it (`kernels.latent_attention.up`, `kernels.latent_attention.prompt`), where that suits.
    """
    heads, own, latent = kv_up.shape
    rope, value = held.keys.shape[-1], out.shape[-1]
    nope = own - value
    seqs, tokens = len(context_len) - first_seq, len(q) - first_seq
    block_b = max(SEQS, next_power_of_2(seqs))
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    padded = ENTRIES if up is None else up.entries
    row_tiles = cdiv(max_total_context, padded) + seqs
    kv = torch.empty(row_tiles * padded, heads * own, dtype=q.dtype, device=cache.device)
    rotated = torch.empty(row_tiles * padded, rope, dtype=q.dtype, device=cache.device)

    size, shared = q.element_size(), shared_bytes(q.device)

    def boxes(source: torch.Tensor, *box: int) -> TensorDescriptor:
        return TensorDescriptor(source, list(source.shape), list(source.stride()), list(box))

    if up is None:
        expand(workspace, kv_up, cache, block_table, context_len, kv, rotated, first_seq)
    else:
        channels = min(up.channels, next_power_of_2(latent))
        stages = fitting_stages(up.stages, (up.outputs + up.entries) * channels * size, shared)
        workspace.launch(_expand, (cdiv(heads * own, up.outputs), row_tiles))(
            held.latents, held.keys, boxes(kv_up.flatten(0, 1), up.outputs, channels), block_table, context_len, kv,
            rotated, held.scale, block_table.stride(0), *held.latents.stride()[:2], *held.keys.stride()[:2], first_seq,
            seqs, OUTPUTS=heads * own, LATENT=latent, ROPE=rope, BLOCK_SIZE=cache.shape[1], ROWS=padded,
            BLOCK_O=up.outputs, BLOCK_C=channels, BLOCK_B=block_b, STAGES=stages, PRECISION=precision,
            num_warps=up.warps,
        )  # fmt: skip
    if tile is None:
        attend_prompts(workspace, q, kv, rotated, query_start, context_len, out, scale, first_seq, max_query, padded)
        return
    # queries stay in shared memory, beside a tile of keys, values and rotated keys
    loaded, stays = tile.keys * (own + rope) * size, tile.queries * (nope + rope) * size
    workspace.launch(_attend, (tokens // tile.queries + seqs, heads))(
        q, boxes(kv, tile.keys, nope), boxes(kv, tile.keys, value), boxes(rotated, tile.keys, rope), query_start,
        context_len, out, q.stride(0), q.stride(1), scale, first_seq, seqs, HEADS=heads, NOPE=nope, ROPE=rope,
        VALUE=value, ROWS=padded, BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_B=block_b, PRECISION=precision,
        num_warps=tile.warps, num_stages=fitting_stages(tile.stages, loaded, shared, stays),
    )  # fmt: skip
