# mypy: disable-error-code="no-untyped-def"
"""A few tokens, in three launches: scores, up products, down products. No launch makes the choice: each program of the
products finds its experts from the scores, which costs less than for all to wait until one program has done so.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe_gemm.rows import RowTile, expert_up
from kernels.moe_route.places import place, places, ranks, softmax_weights
from kernels.moe_route.scores import row_scores
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Elements of the router that four warps of a program of the scores hold.
_HELD = 16384


@triton.jit
def up(
    x,
    gate_up,
    logits,
    h,
    num_experts,
    hidden,
    inter,
    limit,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ACT: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[pair, n] = act(g) ∘ u for BLOCK_N inner channels of the pair's expert."""
    # A token's last experts, which take the most rounds to find, come first.
    k = K - 1 - tl.program_id(1) % K
    t = tl.program_id(1).to(tl.int64) // K
    if PDL:
        # Behind the wait: the next kernel may then read the scores before it waits itself.
        gdc_wait()
        gdc_launch_dependents()
    expert = place(ranks(logits + t * num_experts, num_experts, WARPS, BLOCK_E), k, BLOCK_E).to(tl.int64)
    expert_up(
        x + t * hidden, gate_up, expert, h + (t * K + k) * inter, hidden, inter, limit,
        ACT, LIMITED, BLOCK_N, BLOCK_M, STAGES, EVEN,
    )  # fmt: skip


@triton.jit
def down(
    h,
    matrices,
    logits,
    residual,
    out,
    num_experts,
    hidden,
    inter,
    top_k,
    scale,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] over all of the token's experts in turn; an expert's row is CHUNKS tiles of BLOCK_M. STAGES of 1 has
    one tile, a whole row, on its way in registers; more have a pipeline behind the first."""
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (n < hidden)[:, None] & (m < inter)[None]
    if PDL:
        gdc_launch_dependents()
    # Before the wait: the scores were complete before the kernel before this one let it start.
    # The first expert's tile is asked for before the others are found.
    own = logits + t * num_experts
    rows = matrices + n[:, None].to(tl.int64) * inter + m[None]
    matrix = hidden.to(tl.int64) * inter
    rank = ranks(own, num_experts, WARPS, BLOCK_E)
    ahead = tl.load(rows + place(rank, 0, BLOCK_E).to(tl.int64) * matrix, mask=inside, other=0.0)
    # Keeps the compiler from asking only when the tile is needed.
    tl.debug_barrier()
    picked = places(rank, top_k, BLOCK_K, WARPS, BLOCK_E)
    weight = softmax_weights(own, picked, num_experts, scale, RENORMALIZE, K, BLOCK_K, BLOCK_E)
    if PDL:
        gdc_wait()
    pair = h + t * K * inter
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if STAGES == 1:
        tl.static_assert(CHUNKS == 1)
        for i in tl.range(K, num_stages=1):
            now = ahead
            # behind the last expert its tile is loaded once more and left unused
            expert = tl.sum(tl.where(k == tl.minimum(i + 1, K - 1), picked, 0), 0).to(tl.int64)
            ahead = tl.load(rows + expert * matrix, mask=inside, other=0.0)
            v = tl.load(pair + i * inter + m, mask=m < inter, other=0.0).to(tl.float32)
            total += now.to(tl.float32) * v[None] * tl.sum(tl.where(k == i, weight, 0.0), 0)
    else:
        v = tl.load(pair + m, mask=m < inter, other=0.0).to(tl.float32) * tl.sum(tl.where(k == 0, weight, 0.0), 0)
        total += ahead.to(tl.float32) * v[None]
        for i in tl.range(1, K * CHUNKS, num_stages=STAGES):
            turn = i // CHUNKS
            first = i % CHUNKS * BLOCK_M
            there = first + m < inter
            expert = tl.sum(tl.where(k == turn, picked, 0), 0).to(tl.int64)
            w = tl.load(rows + expert * matrix + first, mask=(n < hidden)[:, None] & there[None], other=0.0)
            v = tl.load(pair + turn * inter + first + m, mask=there, other=0.0).to(tl.float32)
            total += w.to(tl.float32) * (v * tl.sum(tl.where(k == turn, weight, 0.0), 0))[None]
    y = tl.sum(total, 1)
    if RESIDUAL:
        y += tl.load(residual + t * hidden + n, mask=n < hidden, other=0.0).to(tl.float32)
    tl.store(out + t * hidden + n, y.to(out.dtype.element_ty), mask=n < hidden)


def _experts_each(router: torch.Tensor, tokens: int, block_m: int) -> int:
    """Experts that a program of the scores takes for a token. A logit is summed alike by any number of them."""
    if router.dtype == torch.float32:
        return 4
    return 8 if tokens == 1 and 8 * block_m <= _HELD else 2


def routed_rows_moe(
    workspace: Workspace,
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    matrices: torch.Tensor,
    top_k: int,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    renormalize: bool,
    scale: float,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    up_tile: RowTile,
    down_tile: RowTile,
) -> torch.Tensor:
    """`moe` of a softmax without correction, groups or shared experts. A `down_tile` of one stage holds all inner
    channels. With the same tiles a token's sums are taken in one order, whatever stands beside it."""
    (t, hidden), e = x.shape, router.shape[0]
    inter = gate_up.shape[1] // 2
    block_m = next_power_of_2(hidden)
    h = x.contiguous() if norm_weight is None else torch.empty(t, hidden, dtype=x.dtype, device=x.device)
    logits = torch.empty(t, e, dtype=torch.float32, device=x.device)
    inner = torch.empty(t * top_k, inter, dtype=x.dtype, device=x.device)
    out = torch.empty(t, hidden, dtype=x.dtype, device=x.device)
    launch: dict[str, Any] = {"PDL": workspace.pdl, "launch_pdl": workspace.pdl}
    chosen: dict[str, Any] = {"K": top_k, "BLOCK_E": next_power_of_2(e), **launch}
    each = _experts_each(router, t, block_m)
    workspace.launch(row_scores, (cdiv(e, each), t))(
        x, norm_weight, router, h, logits, e, hidden, x.stride(0), eps, offset, NORM=norm_weight is not None,
        BLOCK_N=each, BLOCK_M=block_m, num_warps=4 if each * block_m <= _HELD else 16, **launch,
    )  # fmt: skip
    workspace.launch(up, (cdiv(inter, up_tile.outputs), t * top_k))(
        h, gate_up, logits, inner, e, hidden, inter, limit or 0.0,
        ACT=activation, LIMITED=limit is not None, BLOCK_N=up_tile.outputs, BLOCK_M=up_tile.inputs,
        STAGES=up_tile.stages,
        EVEN=inter % up_tile.outputs == 0 and hidden % up_tile.inputs == 0,
        WARPS=up_tile.warps, num_warps=up_tile.warps, **chosen,
    )  # fmt: skip
    workspace.launch(down, (cdiv(hidden, down_tile.outputs), t))(
        inner, matrices, logits, residual, out, e, hidden, inter, top_k, scale,
        RENORMALIZE=renormalize, BLOCK_K=next_power_of_2(top_k), RESIDUAL=residual is not None,
        BLOCK_N=down_tile.outputs, BLOCK_M=down_tile.inputs,
        CHUNKS=cdiv(inter, down_tile.inputs), STAGES=down_tile.stages,
        WARPS=down_tile.warps, num_warps=down_tile.warps, **chosen,
    )  # fmt: skip
    return out
