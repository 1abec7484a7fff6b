# mypy: disable-error-code="no-untyped-def"
"""Sequences of one query: all heads read an entry once, entries are split over programs, and what combines the partials
takes their sum through the up-projection of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_scales import LatentViews
from kernels.hardware import multiprocessors, shared_bytes
from kernels.pipeline import AttentionTile, fitting_attention
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

LOG2E = tl.constexpr(1.4426950408889634)
_MAX_SPLITS = 64
_MIN_SEQS = 128
# Sequences up to which each has its own programs to combine its partials.
FEW_SEQS = 4


@dataclass(frozen=True, slots=True)
class SplitCut:
    """How sequences of one query are cut: entries a tile and pipeline depth where they fit, warps of a split, programs
    that work on a multiprocessor at once, and values that a program combines, when it does so for several sequences."""

    keys: int
    stages: int
    warps: int
    programs: int = 1
    values: int = 32


@triton.jit
def _split_size(length, context_len, seqs, splits, programs, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Cached tokens of a program of a sequence: enough for all sequences' entries to be read by `programs` programs at
    once."""
    seq = tl.arange(0, BLOCK_B)
    read = tl.load(context_len + seq, mask=seq < seqs, other=0)
    split_size = tl.maximum((length + splits - 1) // splits, tl.sum(read, 0) // programs)
    return tl.maximum((split_size + BLOCK_N - 1) // BLOCK_N, 1) * BLOCK_N


@triton.jit(do_not_specialize=["seqs", "splits", "programs"], do_not_specialize_on_alignment=["context_len"])
def _split_kernel(
    q,
    cache,
    keys,
    block_table,
    context_len,
    partials,
    sums,
    scale,
    latent_scale,
    table_stride,
    block_stride,
    entry_stride,
    key_block_stride,
    key_stride,
    seqs,
    splits,
    programs,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Lengths and tables are written before the first dependent launch of a step, so they are read without waiting.
    if PDL:
        gdc_launch_dependents()
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(context_len + seq)
    split_size = _split_size(length, context_len, seqs, splits, programs, BLOCK_N, BLOCK_B)
    start = split * split_size
    if start >= length:
        return
    stop = tl.minimum(start + split_size, length)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    l = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    blocks = block_table + seq * table_stride
    ahead = tl.load(blocks + (start + n) // BLOCK_SIZE, mask=start + n < stop, other=0)
    if PDL:
        gdc_wait()
    own = q + (seq * HEADS + head[:, None]) * (LATENT + ROPE)
    live = (head < HEADS)[:, None]
    ql = tl.load(own + l[None, :], mask=live & (l < LATENT)[None, :], other=0.0)
    qr = tl.load(own + LATENT + r[None, :], mask=live & (r < ROPE)[None, :], other=0.0)
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_L), tl.float32)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        block = ahead.to(tl.int64)
        following = first + BLOCK_N + n
        ahead = tl.load(blocks + following // BLOCK_SIZE, mask=following < stop, other=0)
        j = first + n
        held = (j < stop)[:, None]
        entry = cache + (block * block_stride + j % BLOCK_SIZE * entry_stride)[:, None]
        c = tl.load(entry + l[None, :], mask=held & (l < LATENT)[None, :], other=0.0)
        turned = keys + (block * key_block_stride + j % BLOCK_SIZE * key_stride)[:, None]
        key = tl.load(turned + r[None, :], mask=held & (r < ROPE)[None, :], other=0.0)
        c = c.to(ql.dtype)
        s = tl.dot(ql, tl.trans(c), input_precision=PRECISION)
        if cache.dtype != q.dtype:
            s = s * latent_scale
        s = tl.dot(qr, tl.trans(key), s, input_precision=PRECISION)
        s = tl.where((j < stop)[None, :], s * (scale * LOG2E), float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        w = tl.exp2(s - top[:, None])
        fade = tl.exp2(best - top)
        total = total * fade + tl.sum(w, 1)
        acc = tl.dot(w.to(c.dtype), c, acc * fade[:, None], input_precision=PRECISION)
        best = top
    if cache.dtype != q.dtype:
        acc = acc * latent_scale
    place = (seq * splits + split) * HEADS + head
    tl.store(sums + place, best + tl.log2(total), mask=head < HEADS)
    tl.store(partials + place[:, None] * LATENT + l[None, :], acc / total[:, None], mask=live & (l < LATENT)[None, :])


@triton.jit
def add_partial(best, total, acc, logsum, partial):
    """The largest logsum [T], weights [T] and their sum acc [T, L] with one more partial, −∞ where there is none."""
    top = tl.maximum(best, logsum)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(logsum - shift)
    fade = tl.exp2(best - shift)
    acc = acc * fade[:, None] + partial * weight[:, None]
    total = total * fade + weight
    return top, total, acc


@triton.jit
def _head_up(p_head, v, l, LATENT: tl.constexpr, VALUE: tl.constexpr):
    """Rows v and columns l of a head's [VALUE, LATENT] that turns latents into values."""
    return tl.load(
        p_head + v[:, None] * LATENT + l[None, :], mask=(v < VALUE)[:, None] & (l < LATENT)[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["seqs", "splits", "programs"], do_not_specialize_on_alignment=["context_len"])
def _combine(
    partials,
    sums,
    v_up,
    context_len,
    out,
    up_stride,
    seqs,
    splits,
    programs,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[sequence, head, v] = v_up[head, v] · (the partials of the sequence's head, weighted by their softmax
    sums)."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    seq = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    l = tl.arange(0, BLOCK_L)
    w = _head_up(v_up + head * up_stride, v, l, LATENT, VALUE)
    length = tl.load(context_len + seq, mask=seq < seqs, other=0)
    active = tl.cdiv(length, _split_size(length, context_len, seqs, splits, programs, BLOCK_N, BLOCK_B))
    if PDL:
        gdc_wait()
    best = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_L), tl.float32)
    for split in tl.range(0, tl.max(active, 0), num_stages=STAGES):
        there = split < active
        place = (seq.to(tl.int64) * splits + split) * HEADS + head
        logsum = tl.load(sums + place, mask=there, other=float("-inf"))
        partial = tl.load(
            partials + place[:, None] * LATENT + l[None, :], mask=there[:, None] & (l < LATENT)[None, :], other=0.0
        )
        best, total, acc = add_partial(best, total, acc, logsum, partial)
    o = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    y = tl.dot(o, tl.trans(w), input_precision=PRECISION)
    place = (seq.to(tl.int64) * HEADS + head)[:, None] * VALUE + v[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=(seq < seqs)[:, None] & (v < VALUE)[None, :])


@triton.jit(do_not_specialize=["seqs", "splits", "programs"], do_not_specialize_on_alignment=["context_len"])
def _combine_one(
    partials,
    sums,
    v_up,
    context_len,
    out,
    up_stride,
    seqs,
    splits,
    programs,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """`_combine` of one sequence: BLOCK_S of its partials at once."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    seq = tl.program_id(2).to(tl.int64)
    l = tl.arange(0, BLOCK_L)
    s = tl.arange(0, BLOCK_S)
    w = _head_up(v_up + head * up_stride, v, l, LATENT, VALUE)
    length = tl.load(context_len + seq)
    active = tl.cdiv(length, _split_size(length, context_len, seqs, splits, programs, BLOCK_N, BLOCK_B))
    if PDL:
        gdc_wait()
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    o = tl.zeros((BLOCK_L,), tl.float32)
    for first in range(0, active, BLOCK_S):
        there = first + s < active
        place = (seq * splits + first + s) * HEADS + head
        logsum = tl.load(sums + place, mask=there, other=float("-inf"))
        partial = tl.load(
            partials + place[:, None] * LATENT + l[None, :], mask=there[:, None] & (l < LATENT)[None, :], other=0.0
        )
        top = tl.maximum(best, tl.max(logsum, 0))
        weight = tl.exp2(logsum - top)
        fade = tl.exp2(best - top)
        o = o * fade + tl.sum(partial * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        best = top
    o = o / tl.where(total == 0.0, 1.0, total)
    y = tl.sum(w.to(tl.float32) * o[None, :], 1)
    tl.store(out + (seq * HEADS + head) * VALUE + v, y.to(out.dtype.element_ty), mask=v < VALUE)


@lru_cache(maxsize=64)
def _splits(seqs: int, head_tiles: int, max_context: int, keys: int, processors: int) -> int:
    """Programs a sequence may have: eight for each that would do, so that sequences of very different length still
    spread."""
    wanted = cdiv(8 * processors, seqs * head_tiles)
    return max(1, min(wanted, cdiv(max_context, keys), _MAX_SPLITS))


def latent_tile(tile: AttentionTile, absorbed: torch.Tensor, held: LatentViews) -> AttentionTile:
    """The tile of a loop over entries, or what of it fits the GPU: rows are of absorbed queries, keys are entries."""
    latent, rope = (max(16, next_power_of_2(part.shape[-1])) for part in (held.latents, held.keys))
    size = absorbed.element_size()
    # 8-bit latents stand there as float32 as well; tensor cores take them in 16 bits from registers
    widened = size if size == 4 and held.latents.dtype != absorbed.dtype else 0
    entry = latent * (held.latents.element_size() + widened) + rope * held.keys.element_size()
    return fitting_attention(tile, entry, (latent + rope) * size, size, shared_bytes(absorbed.device))


@dataclass(frozen=True, slots=True)
class Splits:
    """partials [seqs, splits, H, L] of sequences and sums [seqs, splits, H], the binary logarithms of what their
    softmax was divided by, both float32 and written where a split has entries; programs, entries of a tile and blocks
    as launched."""

    partials: torch.Tensor
    sums: torch.Tensor
    splits: int
    programs: int
    keys: int
    block_l: int
    block_b: int


def attend_splits(
    workspace: Workspace,
    absorbed: torch.Tensor,
    held: LatentViews,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    seqs: int,
    max_context: int,
    cut: SplitCut,
) -> Splits:
    """What the first `seqs` sequences, which have one query each, read, split over programs."""
    _, heads, width = absorbed.shape
    latent = held.latents.shape[-1]
    given = AttentionTile(min(64, max(16, next_power_of_2(heads))), cut.keys, cut.stages)
    block_h, keys, stages = latent_tile(given, absorbed, held)
    head_tiles = cdiv(heads, block_h)
    processors = multiprocessors(absorbed.device)
    splits = _splits(seqs, head_tiles, max_context, keys, processors)
    programs = max(1, cut.programs * processors // head_tiles)
    partials = torch.empty(seqs, splits, heads, latent, dtype=torch.float32, device=absorbed.device)
    sums = torch.empty(seqs, splits, heads, dtype=torch.float32, device=absorbed.device)
    block_l = max(16, next_power_of_2(latent))
    block_b = max(_MIN_SEQS, next_power_of_2(seqs))
    workspace.launch(_split_kernel, (seqs, head_tiles, splits))(
        absorbed, held.latents, held.keys, block_table, context_len, partials, sums, scale, held.scale,
        block_table.stride(0), *held.latents.stride()[:2], *held.keys.stride()[:2], seqs, splits, programs,
        HEADS=heads, LATENT=latent, ROPE=width - latent, BLOCK_SIZE=held.keys.shape[1], BLOCK_H=block_h,
        BLOCK_L=block_l, BLOCK_R=max(16, next_power_of_2(width - latent)), BLOCK_N=keys, BLOCK_B=block_b,
        STAGES=stages, PRECISION=_precision(absorbed), PDL=workspace.pdl, launch_pdl=workspace.pdl,
        num_warps=cut.warps,
    )  # fmt: skip
    return Splits(partials, sums, splits, programs, keys, block_l, block_b)


def attend_split_kv(
    workspace: Workspace,
    absorbed: torch.Tensor,
    kv_up: torch.Tensor,
    held: LatentViews,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    seqs: int,
    max_context: int,
    cut: SplitCut,
) -> None:
    """`latent_attention` of the first `seqs` sequences, which have one query each, written into `out`'s first rows."""
    heads, latent, value = absorbed.shape[1], kv_up.shape[-1], out.shape[-1]
    nope = kv_up.shape[1] - value
    made = attend_splits(workspace, absorbed, held, block_table, context_len, scale, seqs, max_context, cut)
    block_v = min(32 if seqs <= FEW_SEQS else cut.values, max(16, next_power_of_2(value)))
    sizes = {"HEADS": heads, "LATENT": latent, "VALUE": value, "BLOCK_L": made.block_l, "BLOCK_V": block_v}
    common = {
        "BLOCK_N": made.keys,
        "BLOCK_B": made.block_b,
        "PDL": workspace.pdl,
        "launch_pdl": workspace.pdl,
        "num_warps": 8,
    }
    scheduled = (seqs, made.splits, made.programs)
    combined = (made.partials, made.sums, kv_up[:, nope:], context_len, out, kv_up.stride(0), *scheduled)
    if seqs <= FEW_SEQS:
        workspace.launch(_combine_one, (heads, cdiv(value, block_v), seqs))(*combined, BLOCK_S=16, **sizes, **common)
        return
    workspace.launch(_combine, (heads, cdiv(value, block_v), cdiv(seqs, 16)))(
        *combined, BLOCK_T=16, STAGES=3, PRECISION=_precision(absorbed), **sizes, **common
    )


def _precision(absorbed: torch.Tensor) -> str:
    return "ieee" if absorbed.dtype == torch.float32 else "tf32"
