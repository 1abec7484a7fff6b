# mypy: disable-error-code="no-untyped-def"
"""The lightning indexer: scores of a query's heads against a tile of entries, then a selection by the digits of the
scores. A query with no more entries than places reads them all, unscored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import AttentionBatch
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

SCORE_BYTES = 256 << 20
BLOCK_N = 64
# Entries that a selecting program looks at at once, and bits of a score that a pass over them settles.
LOOK, DIGIT = 2048, 8


@triton.jit
def _query(query_start, first_seq):
    """The program's sequence, how many queries it has, which of them this is, and its token. There may be no such."""
    seq = first_seq + tl.program_id(0)
    lo = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - lo
    which = tl.program_id(1)
    return seq, count, which, (lo + which).to(tl.int64)


@triton.jit(
    do_not_specialize=["first_seq", "first_token", "last_token", "width"],
    do_not_specialize_on_alignment=["query_start", "context_len", "block_table"],
)
def _score(
    q,
    weights,
    cache,
    block_table,
    query_start,
    context_len,
    scores,
    scale,
    first_seq,
    first_token,
    last_token,
    width,
    weight_stride,
    table_stride,
    block_stride,
    entry_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq, count, which, token = _query(query_start, first_seq)
    if (which >= count) | (token < first_token) | (token >= last_token):
        return
    ready = (tl.load(context_len + seq) - count + which + 1) // RATIO
    begin = tl.program_id(2) * BLOCK_N
    if (ready <= TOP_K) | (begin >= ready):
        return
    e = begin + tl.arange(0, BLOCK_N)
    live = e < ready
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    block = tl.load(block_table + seq.to(tl.int64) * table_stride + e // PER_BLOCK, mask=live, other=0)
    entry = cache + block.to(tl.int64) * block_stride + e % PER_BLOCK * entry_stride
    k = tl.load(entry[None] + d[:, None], mask=live[None] & (d < DIM)[:, None], other=0.0)
    head = (token * HEADS + h)[:, None] * DIM + d[None]
    x = tl.load(q + head, mask=(h < HEADS)[:, None] & (d < DIM)[None], other=0.0)
    w = tl.load(weights + token * weight_stride + h, mask=h < HEADS, other=0.0).to(tl.float32)
    s = tl.maximum(tl.dot(x, k, input_precision=PRECISION), 0.0)
    s = tl.sum(s * w[:, None], 0) * scale
    tl.store(scores + (token - first_token) * width + e, s, mask=live)


@triton.jit
def _ordinals(scores, i, ready):
    """Unsigned numbers in the order of the scores, so that −0 is 0; 0 past the last."""
    s = tl.load(scores + i, mask=i < ready, other=0.0)
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    up = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (up.to(tl.uint32, bitcast=True) ^ 0x80000000).to(tl.int64)


@triton.jit(
    do_not_specialize=["first_seq", "first_token", "last_token", "width"],
    do_not_specialize_on_alignment=["query_start", "context_len"],
)
def _select(
    scores,
    query_start,
    context_len,
    out,
    first_seq,
    first_token,
    last_token,
    width,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOOK: tl.constexpr,
    DIGIT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq, count, which, token = _query(query_start, first_seq)
    if (which >= count) | (token < first_token) | (token >= last_token):
        return
    ready = (tl.load(context_len + seq) - count + which + 1) // RATIO
    k = tl.arange(0, BLOCK_K)
    mine = out + token * TOP_K
    if ready <= TOP_K:
        tl.store(mine + k, tl.where(k < ready, k, -1), mask=k < TOP_K)
        return
    row = scores + (token - first_token) * width
    look = tl.arange(0, LOOK)
    bins: tl.constexpr = 1 << DIGIT
    digit = tl.arange(0, bins)
    # Digit by digit, from the highest: the number whose rank is TOP_K, and how many of those equal to it are wanted.
    floor = tl.zeros((), tl.int64)
    wanted = tl.full((), TOP_K, tl.int32)
    for step in tl.static_range(32 // DIGIT):
        low = 32 - DIGIT * (step + 1)
        found = tl.zeros((bins,), tl.int32)
        for first in range(0, ready, LOOK):
            x = _ordinals(row, first + look, ready)
            alike = (first + look < ready) & ((x >> (low + DIGIT)) == (floor >> (low + DIGIT)))
            found += tl.histogram(((x >> low) & (bins - 1)).to(tl.int32), bins, mask=alike)
        from_here = tl.cumsum(found, 0, reverse=True)
        chosen = tl.max(tl.where(from_here >= wanted, digit, 0), 0)
        wanted -= tl.sum(tl.where(digit > chosen, found, 0), 0)
        floor += chosen.to(tl.int64) << low
    place = 0
    equal = 0
    for first in range(0, ready, LOOK):
        x = _ordinals(row, first + look, ready)
        live = first + look < ready
        same = tl.where(live & (x == floor), 1, 0)
        # of equal scores the earlier are kept
        kept = tl.where((live & (x > floor)) | ((same > 0) & (equal + tl.cumsum(same, 0) <= wanted)), 1, 0)
        at = place + tl.cumsum(kept, 0) - 1
        tl.store(mine + at, first + look, mask=kept > 0)
        place += tl.sum(kept, 0)
        equal += tl.sum(same, 0)


def index_topk(
    workspace: Workspace,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    ratio: int,
    top_k: int,
    scale: float,
    deterministic: bool = False,
) -> torch.Tensor:
    """See the reference. Tokens go in pieces, so that scores stay within bounds. The last axes are dense. A query's
    scores are always those of a program of its own."""
    num_single = batch.num_single
    t, heads, dim = q.shape
    seqs = batch.context_len.shape[0]
    width = batch.max_context // ratio
    out = torch.empty((t, top_k), dtype=torch.int32, device=q.device)
    if not t:
        return out
    q = q.contiguous()
    pdl = workspace.pdl
    scored = width > top_k
    piece = max(1, min(t, SCORE_BYTES // (4 * width))) if scored else t
    scores = torch.empty((piece, width) if scored else (1,), dtype=torch.float32, device=q.device)
    for begin in range(0, t, piece):
        end = min(t, begin + piece)
        for first, count, longest in ((0, num_single, 1), (num_single, seqs - num_single, batch.max_query)):
            if not count:
                continue
            if scored:
                workspace.launch(_score, (count, longest, cdiv(width, BLOCK_N)))(
                    q,
                    weights,
                    cache,
                    block_table,
                    batch.query_start,
                    batch.context_len,
                    scores,
                    scale,
                    first,
                    begin,
                    end,
                    width,
                    weights.stride(0),
                    block_table.stride(0),
                    cache.stride(0),
                    cache.stride(1),
                    HEADS=heads,
                    DIM=dim,
                    RATIO=ratio,
                    PER_BLOCK=cache.shape[1],
                    TOP_K=top_k,
                    BLOCK_H=max(16, next_power_of_2(heads)),
                    BLOCK_D=max(16, next_power_of_2(dim)),
                    BLOCK_N=BLOCK_N,
                    PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                    PDL=pdl,
                    launch_pdl=pdl,
                )
            workspace.launch(_select, (count, longest))(
                scores,
                batch.query_start,
                batch.context_len,
                out,
                first,
                begin,
                end,
                width,
                RATIO=ratio,
                TOP_K=top_k,
                BLOCK_K=next_power_of_2(top_k),
                LOOK=LOOK,
                DIGIT=DIGIT,
                PDL=pdl,
                launch_pdl=pdl,
                num_warps=8,
            )
    return out
