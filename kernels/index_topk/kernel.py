"""The lightning indexer: scores of a query's heads against a tile of entries, then torch's own selection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SCORE_BYTES = 256 << 20


@triton.jit(do_not_specialize=["first_line", "last_token"])
def _score(
    q,
    weights,
    cache,
    block_table,
    query_start,
    context_len,
    scores,
    scale,
    first_line,
    first_token,
    last_token,
    width,
    table_stride,
    block_stride,
    entry_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    line = first_line + tl.program_id(0)
    lo = tl.load(query_start + line)
    count = tl.load(query_start + line + 1) - lo
    which = tl.program_id(1)
    token = (lo + which).to(tl.int64)
    if (which >= count) | (token < first_token) | (token >= last_token):
        return
    ready = (tl.load(context_len + line) - count + which + 1) // RATIO
    e = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = e < ready
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    block = tl.load(block_table + line.to(tl.int64) * table_stride + e // PER_BLOCK, mask=live, other=0)
    entry = cache + block.to(tl.int64) * block_stride + e % PER_BLOCK * entry_stride
    k = tl.load(entry[None] + d[:, None], mask=live[None] & (d < DIM)[:, None], other=0.0)
    head = (token * HEADS + h)[:, None] * DIM + d[None]
    x = tl.load(q + head, mask=(h < HEADS)[:, None] & (d < DIM)[None], other=0.0)
    w = tl.load(weights + token * HEADS + h, mask=h < HEADS, other=0.0).to(tl.float32)
    s = tl.maximum(tl.dot(x, k, input_precision=PRECISION), 0.0)
    s = tl.sum(s * w[:, None], 0) * scale
    tl.store(scores + (token - first_token) * width + e, tl.where(live, s, float("-inf")), mask=e < width)


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    ratio: int,
    top_k: int,
    scale: float,
    num_single: int,
    max_query: int,
    max_context: int,
) -> torch.Tensor:
    """See the reference. Tokens go in pieces, so that scores stay within bounds."""
    t, heads, dim = q.shape
    lines = context_len.shape[0]
    width = max_context // ratio
    out = torch.full((t, top_k), -1, dtype=torch.int32, device=q.device)
    if not (t and width):
        return out
    q, weights = q.contiguous(), weights.contiguous()
    piece = max(1, min(t, SCORE_BYTES // (4 * width)))
    for begin in range(0, t, piece):
        end = min(t, begin + piece)
        scores = torch.full((end - begin, width), float("-inf"), dtype=torch.float32, device=q.device)
        for first, count, longest in ((0, num_single, 1), (num_single, lines - num_single, max_query)):
            if count:
                _score[(count, longest, triton.cdiv(width, 64))](
                    q,
                    weights,
                    cache,
                    block_table,
                    query_start,
                    context_len,
                    scores,
                    scale,
                    first,
                    begin,
                    end,
                    width,
                    block_table.stride(0),
                    cache.stride(0),
                    cache.stride(1),
                    HEADS=heads,
                    DIM=dim,
                    RATIO=ratio,
                    PER_BLOCK=cache.shape[1],
                    BLOCK_H=max(16, triton.next_power_of_2(heads)),
                    BLOCK_D=max(16, triton.next_power_of_2(dim)),
                    BLOCK_N=64,
                    PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                )
        # One integer orders by score, then by place: −0 counts as 0, and of equal scores the earlier is the larger.
        bits = (scores + 0.0).view(torch.int32)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
        best = torch.topk(order | torch.arange(width - 1, -1, -1, device=q.device), min(top_k, width), dim=-1).indices
        kept = torch.where(scores.gather(1, best) == float("-inf"), -1, best)
        out[begin:end, : kept.shape[1]] = kept.int()
    return out
