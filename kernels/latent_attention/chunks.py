# mypy: disable-error-code="no-untyped-def"
"""Sequences of several queries over the latents themselves: a program takes some queries and heads of a sequence and
reads each entry once for all. For steps whose lengths the host does not know; see `expand` for the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cache_scales import LatentViews
from kernels.group_linear.kernel import group_linear
from kernels.latent_attention.split_kv import latent_tile
from kernels.pipeline import AttentionTile
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Dense
from kernels.workspace import Workspace

# Rows and entries of a tile, and the depth of the loop over entries, where they fit.
TILE = AttentionTile(64, 32, 2)


@triton.jit(do_not_specialize=["first_seq"], do_not_specialize_on_alignment=["query_start", "context_len"])
def _attend(
    q,
    cache,
    keys,
    block_table,
    query_start,
    context_len,
    out,
    scale,
    latent_scale,
    first_seq,
    table_stride,
    block_stride,
    entry_stride,
    key_block_stride,
    key_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    seq = first_seq + tl.program_id(0)
    head_tiles = tl.cdiv(HEADS, BLOCK_H)
    query = tl.program_id(1) // head_tiles * QUERIES
    lo = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - lo
    length = tl.load(context_len + seq)
    if query >= count:
        return
    row = tl.arange(0, QUERIES * BLOCK_H)
    head = tl.program_id(1) % head_tiles * BLOCK_H + row % BLOCK_H
    which = query + row // BLOCK_H
    live = (head < HEADS) & (which < count)
    token = (lo + which).to(tl.int64)
    position = length - count + which

    d = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    base = (token * HEADS + head)[:, None]
    own = q + base * (LATENT + ROPE)
    ql = tl.load(own + d[None], mask=live[:, None] & (d < LATENT)[None], other=0.0)
    qr = tl.load(own + LATENT + r[None], mask=live[:, None] & (r < ROPE)[None], other=0.0)
    best = tl.full((QUERIES * BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES * BLOCK_H,), tl.float32)
    acc = tl.zeros((QUERIES * BLOCK_H, BLOCK_L), tl.float32)

    end = tl.minimum(length, length - count + query + QUERIES)
    n = tl.arange(0, BLOCK_N)
    blocks = block_table + seq.to(tl.int64) * table_stride
    ahead = tl.load(blocks + n // BLOCK_SIZE, mask=n < end, other=0)
    for first in range(0, end, BLOCK_N):
        block = ahead.to(tl.int64)
        following = first + BLOCK_N + n
        ahead = tl.load(blocks + following // BLOCK_SIZE, mask=following < end, other=0)
        j = first + n
        entry = cache + block * block_stride + j % BLOCK_SIZE * entry_stride
        c = tl.load(entry[:, None] + d[None], mask=(j < end)[:, None] & (d < LATENT)[None], other=0.0)
        turned = keys + block * key_block_stride + j % BLOCK_SIZE * key_stride
        kr = tl.load(turned[:, None] + r[None], mask=(j < end)[:, None] & (r < ROPE)[None], other=0.0)
        c = c.to(ql.dtype)
        s = tl.dot(ql, tl.trans(c), input_precision=PRECISION)
        if cache.dtype != q.dtype:
            s = s * latent_scale
        s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION) * scale
        s = tl.where((j[None] <= position[:, None]) & (j < end)[None], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        # A row that has seen no key yet keeps −inf; its weights are 0, not NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp(s - shift[:, None])
        fade = tl.exp(best - shift)
        total = total * fade + tl.sum(w, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(w.to(c.dtype), c, acc, input_precision=PRECISION)
        best = top
    o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if cache.dtype != q.dtype:
        o = o * latent_scale
    tl.store(out + base * LATENT + d[None], o.to(out.dtype.element_ty), mask=live[:, None] & (d < LATENT)[None])


def attend_chunks(
    workspace: Workspace,
    absorbed: torch.Tensor,
    kv_up: torch.Tensor,
    held: LatentViews,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    first_seq: int,
    max_query: int,
    deterministic: bool = False,
) -> None:
    """`latent_attention` of the sequences from `first_seq` on, whose tokens start there too, written into `out`."""
    t, heads, width = absorbed.shape
    latent, value = kv_up.shape[-1], out.shape[-1]
    rows, entries, stages = latent_tile(TILE, absorbed, held)
    block_h = min(rows, max(16, next_power_of_2(heads)))
    queries = rows // block_h
    o = torch.empty(t, heads, latent, dtype=out.dtype, device=out.device)
    workspace.launch(_attend, (len(context_len) - first_seq, cdiv(max_query, queries) * cdiv(heads, block_h)))(
        absorbed, held.latents, held.keys, block_table, query_start, context_len, o, scale, held.scale, first_seq,
        block_table.stride(0), *held.latents.stride()[:2], *held.keys.stride()[:2], HEADS=heads, LATENT=latent,
        ROPE=width - latent, BLOCK_SIZE=held.keys.shape[1],
        QUERIES=queries, BLOCK_H=block_h, BLOCK_L=max(16, next_power_of_2(latent)),
        BLOCK_R=max(16, next_power_of_2(width - latent)), BLOCK_N=entries,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32", num_warps=8, num_stages=stages,
    )  # fmt: skip
    v_up = kv_up[:, kv_up.shape[1] - value :]
    if deterministic:
        out[first_seq:] = group_linear(workspace, o[first_seq:].flatten(1), Dense(v_up), deterministic).view(
            -1, heads, value
        )
        return
    torch.bmm(o[first_seq:].transpose(0, 1), v_up.transpose(1, 2), out=out[first_seq:].transpose(0, 1))
