# mypy: disable-error-code="no-untyped-def"
"""A few tokens, in three launches: scores, up products, down products. No launch makes the choice: each program of the
products finds its experts from the scores, which costs less than for all to wait until one program has done so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe_gemm.rows import RowTile, activate
from kernels.moe_route.places import place, places, ranks, shares
from kernels.moe_route.scores import row_scores
from kernels.prefetch import prefetch


@triton.jit
def scores(
    x,
    norm,
    router,
    h,
    logits,
    num_experts,
    hidden,
    x_stride,
    eps,
    offset,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, t) gives BLOCK_N logits of token t, and the first its normed row h; BLOCK_M holds a row."""
    row_scores(x, norm, router, h, logits, num_experts, hidden, x_stride, eps, offset, NORM, BLOCK_N, BLOCK_M, PDL)


@triton.jit
def up(
    x,
    gate_up,
    logits,
    bias,
    table,
    token_ids,
    h,
    num_experts,
    hidden,
    inter,
    limit,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HASHED: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GELU: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    TURNS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    EVEN: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[pair, n] = act(g) ∘ u for TURNS tiles of BLOCK_N inner channels, one after another in one pipeline; a row of
    the expert's matrix is CHUNKS tiles of BLOCK_M. LINES of 64 values hold an input."""
    width: tl.constexpr = K + SHARED
    # A token's last experts come first: those every token takes are known before the choice.
    k = width - 1 - tl.program_id(1) % width
    t = tl.program_id(1).to(tl.int64) // width
    first_n = tl.program_id(0) * (BLOCK_N * TURNS)
    n = first_n + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    expert = num_experts + k - K
    if PDL:
        if SHARED > 0:  # noqa: SIM102 (known when it is compiled)
            if k >= K:
                known = expert.to(tl.int64) * 2 * inter + tl.minimum(n, inter - 1)
                line = tl.minimum(tl.arange(0, LINES) * 64, hidden - 1)
                prefetch(gate_up + known[:, None] * hidden + line[None])
                prefetch(gate_up + (known + inter)[:, None] * hidden + line[None])
        # Behind the wait: the next kernel may then read the scores before it waits itself.
        gdc_wait()
        gdc_launch_dependents()
    if k < K:
        if HASHED:
            expert = tl.load(table + tl.load(token_ids + t).to(tl.int64) * K + k).to(tl.int32)
        else:
            rank = ranks(logits + t * num_experts, bias, num_experts, SCORE, HAS_BIAS, WARPS, BLOCK_E)
            expert = place(rank, k, BLOCK_E)
    row = x + t * hidden + m
    gate_rows = gate_up + (expert.to(tl.int64) * 2 * inter + n[:, None]) * hidden + m[None]
    up_rows = gate_rows + inter.to(tl.int64) * hidden
    out = h + (t * width + k) * inter + n
    g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # a bound that the compiler does not know: unrolled, the loop takes more registers
    for i in tl.range(0, TURNS * tl.cdiv(hidden, BLOCK_M), num_stages=STAGES):
        first = i % CHUNKS * BLOCK_M
        done = i // CHUNKS * BLOCK_N
        at = done * hidden + first
        if EVEN:
            v = tl.load(row + first)
            a = tl.load(gate_rows + at)
            b = tl.load(up_rows + at)
        else:
            inside = (done + n[:, None] < inter) & (first + m[None] < hidden)
            v = tl.load(row + first, mask=first + m < hidden, other=0.0)
            a = tl.load(gate_rows + at, mask=inside, other=0.0)
            b = tl.load(up_rows + at, mask=inside, other=0.0)
        v = v.to(tl.float32)[None]
        g += a.to(tl.float32) * v
        u += b.to(tl.float32) * v
        if TURNS > 1:  # noqa: SIM102 (known when it is compiled)
            if i % CHUNKS == CHUNKS - 1:
                y = activate(tl.sum(g, 1), tl.sum(u, 1), limit, GELU, LIMITED)
                tl.store(out + done, y.to(h.dtype.element_ty), mask=done + n < inter)
                g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if TURNS == 1:
        y = activate(tl.sum(g, 1), tl.sum(u, 1), limit, GELU, LIMITED)
        tl.store(out, y.to(h.dtype.element_ty), mask=n < inter)


@triton.jit
def down(
    h,
    matrices,
    logits,
    bias,
    table,
    token_ids,
    residual,
    out,
    num_experts,
    hidden,
    inter,
    top_k,
    scale,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HASHED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] over all of the token's experts in turn; an expert's row is CHUNKS tiles of BLOCK_M. STAGES of 1 has
    one tile on its way, in registers; more have a pipeline behind the first."""
    width: tl.constexpr = K + SHARED
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live = (n < hidden)[:, None]
    if PDL:
        gdc_launch_dependents()
    # Before the wait: the scores were complete before the kernel before this one let it start.
    # The first expert's tile is asked for before the others are found.
    own = logits + t * num_experts
    rows = matrices + n[:, None].to(tl.int64) * inter + m[None]
    matrix = hidden.to(tl.int64) * inter
    if HASHED:
        picked = tl.load(table + tl.load(token_ids + t).to(tl.int64) * K + k, mask=k < K, other=0).to(tl.int32)
        expert = tl.sum(tl.where(k == 0, picked, 0), 0).to(tl.int64)
    else:
        rank = ranks(own, bias, num_experts, SCORE, HAS_BIAS, WARPS, BLOCK_E)
        expert = place(rank, 0, BLOCK_E).to(tl.int64)
    ahead = tl.load(rows + expert * matrix, mask=live & (m < inter)[None], other=0.0)
    # Keeps the compiler from asking only when the tile is needed.
    tl.debug_barrier()
    if not HASHED:
        picked = places(rank, top_k, BLOCK_K, WARPS, BLOCK_E)
    weight = shares(own, picked, num_experts, scale, SCORE, RENORMALIZE, K, BLOCK_K, BLOCK_E)
    picked = tl.where(k < K, picked, num_experts + k - K)
    if PDL:
        gdc_wait()
    pair = h + t * width * inter
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if STAGES == 1:
        for i in tl.range(width, num_stages=1):
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for c in tl.static_range(CHUNKS):
                now = ahead
                if c + 1 < CHUNKS:
                    col = (c + 1) * BLOCK_M
                else:
                    # behind the last expert its last tile is loaded once more and left unused
                    col = 0
                    expert = tl.sum(tl.where(k == tl.minimum(i + 1, width - 1), picked, 0), 0).to(tl.int64)
                ahead = tl.load(rows + expert * matrix + col, mask=live & (col + m < inter)[None], other=0.0)
                at = c * BLOCK_M + m
                v = tl.load(pair + i * inter + at, mask=at < inter, other=0.0).to(tl.float32)
                acc += now.to(tl.float32) * v[None]
            total += acc * tl.sum(tl.where(k == i, weight, 0.0), 0)
    else:
        v = tl.load(pair + m, mask=m < inter, other=0.0).to(tl.float32) * tl.sum(tl.where(k == 0, weight, 0.0), 0)
        total += ahead.to(tl.float32) * v[None]
        for i in tl.range(1, width * CHUNKS, num_stages=STAGES):
            turn = i // CHUNKS
            col = i % CHUNKS * BLOCK_M + m
            expert = tl.sum(tl.where(k == turn, picked, 0), 0).to(tl.int64)
            w = tl.load(rows + expert * matrix + i % CHUNKS * BLOCK_M, mask=live & (col < inter)[None], other=0.0)
            v = tl.load(pair + turn * inter + col, mask=col < inter, other=0.0).to(tl.float32)
            total += w.to(tl.float32) * (v * tl.sum(tl.where(k == turn, weight, 0.0), 0))[None]
    y = tl.sum(total, 1)
    if RESIDUAL:
        y += tl.load(residual + t * hidden + n, mask=n < hidden, other=0.0).to(tl.float32)
    tl.store(out + t * hidden + n, y.to(out.dtype.element_ty), mask=n < hidden)


@dataclass(frozen=True, slots=True)
class RowCut:
    """Experts a program of the scores; the cut of both products; tiles that a program of the up product walks."""

    experts: int
    up: RowTile
    turns: int
    down: RowTile


def rows_moe(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    matrices: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    residual: torch.Tensor | None,
    score: str,
    top_k: int,
    num_shared: int,
    renormalize: bool,
    scale: float,
    gelu: bool,
    limit: float | None,
    cut: RowCut,
    pdl: bool,
) -> torch.Tensor:
    """`moe` without groups of experts. A token's sums are taken in one order, whatever stands beside it."""
    (t, hidden), e = x.shape, router.shape[0]
    inter, width = gate_up.shape[1] // 2, top_k + num_shared
    block_m = triton.next_power_of_2(hidden)
    h = x.contiguous() if norm_weight is None else torch.empty(t, hidden, dtype=x.dtype, device=x.device)
    logits = torch.empty(t, e, dtype=torch.float32, device=x.device)
    inner = torch.empty(t * width, inter, dtype=x.dtype, device=x.device)
    out = torch.empty(t, hidden, dtype=x.dtype, device=x.device)
    launch: dict[str, Any] = {"PDL": pdl, "launch_pdl": pdl}
    chosen: dict[str, Any] = {
        "SCORE": score,
        "HAS_BIAS": bias is not None,
        "HASHED": table is not None,
        "K": top_k,
        "SHARED": num_shared,
        "BLOCK_E": triton.next_power_of_2(e),
        **launch,
    }
    scores[(triton.cdiv(e, cut.experts), t)](
        x, norm_weight, router, h, logits, e, hidden, x.stride(0), eps, offset, NORM=norm_weight is not None,
        BLOCK_N=cut.experts, BLOCK_M=block_m, num_warps=4 if cut.experts * block_m <= 16384 else 16, **launch,
    )  # fmt: skip
    tile = cut.up
    up[(triton.cdiv(inter, tile.outputs * cut.turns), t * width)](
        h, gate_up, logits, bias, table, token_ids, inner, e, hidden, inter, limit or 0.0,
        GELU=gelu, LIMITED=limit is not None, BLOCK_N=tile.outputs, BLOCK_M=tile.inputs,
        CHUNKS=triton.cdiv(hidden, tile.inputs), TURNS=cut.turns, STAGES=tile.stages,
        LINES=triton.next_power_of_2(triton.cdiv(hidden, 64)),
        EVEN=inter % (tile.outputs * cut.turns) == 0 and hidden % tile.inputs == 0,
        WARPS=tile.warps, num_warps=tile.warps, maxnreg=tile.registers, **chosen,
    )  # fmt: skip
    tile = cut.down
    down[(triton.cdiv(hidden, tile.outputs), t)](
        inner, matrices, logits, bias, table, token_ids, residual, out, e, hidden, inter, top_k, scale,
        RENORMALIZE=renormalize, BLOCK_K=triton.next_power_of_2(width), RESIDUAL=residual is not None,
        CHUNKS=triton.cdiv(inter, tile.inputs), BLOCK_N=tile.outputs, BLOCK_M=tile.inputs, STAGES=tile.stages,
        WARPS=tile.warps, num_warps=tile.warps, maxnreg=tile.registers, **chosen,
    )  # fmt: skip
    return out
