# mypy: disable-error-code="no-untyped-def"
"""A few tokens: each pair of token and expert reads its expert's matrices row by row, as fast as memory gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.prefetch import prefetch
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace


@triton.jit
def activate(g, u, limit, ACT: tl.constexpr, LIMITED: tl.constexpr):
    """act(gate) · up, or `gated` as the reference has it; LIMITED clips the gate above and up on both sides first."""
    if LIMITED:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
    if ACT == "swiglu_oai":
        return g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)
    if ACT == "gelu_tanh":
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        # tanh(z) = 1 − 2 / (e²ᶻ + 1)
        return 0.5 * g * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)) * u
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit
def bias_of(biases, rows, live):
    """A bias for each of an expert's outputs [BLOCK_N, 1], whose `rows` these are in the table."""
    return tl.load(biases + rows, mask=live, other=0.0).to(tl.float32)[:, None]


@triton.jit
def expert_up(
    row,
    gate_up,
    expert,
    out,
    hidden,
    inter,
    limit,
    ACT: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """out[n] = act(g) ∘ u of a row for the program's BLOCK_N of the expert's inner channels."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    gate_rows = gate_up + (expert * 2 * inter + n[:, None]) * hidden + m[None]
    up_rows = gate_rows + inter.to(tl.int64) * hidden
    g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in tl.range(0, hidden, BLOCK_M, num_stages=STAGES):
        if EVEN:
            v = tl.load(row + first + m)
            a = tl.load(gate_rows + first)
            b = tl.load(up_rows + first)
        else:
            inside = (n[:, None] < inter) & (first + m[None] < hidden)
            v = tl.load(row + first + m, mask=first + m < hidden, other=0.0)
            a = tl.load(gate_rows + first, mask=inside, other=0.0)
            b = tl.load(up_rows + first, mask=inside, other=0.0)
        v = v.to(tl.float32)[None]
        g += a.to(tl.float32) * v
        u += b.to(tl.float32) * v
    y = activate(tl.sum(g, 1), tl.sum(u, 1), limit, ACT, LIMITED)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < inter)


@triton.jit
def rows_up(
    x,
    gate_up,
    experts,
    h,
    num_experts,
    hidden,
    inter,
    limit,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ACT: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CACHE_LINES: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[pair, n] = act(g) ∘ u for BLOCK_N of the expert's inner channels. CACHE_LINES of 64 values hold an input."""
    # A token's last experts come first: those every token takes, SHARED of them, are known before the choice is made.
    k = K - 1 - tl.program_id(1) % K
    pair = tl.program_id(1).to(tl.int64) // K * K + k
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        if SHARED > 0:  # noqa: SIM102 (known when it is compiled)
            if k >= K - SHARED:
                known = (num_experts - K + k).to(tl.int64) * 2 * inter + tl.minimum(n, inter - 1)
                cache_line = tl.minimum(tl.arange(0, CACHE_LINES) * 64, hidden - 1)
                prefetch(gate_up + known[:, None] * hidden + cache_line[None])
                prefetch(gate_up + (known + inter)[:, None] * hidden + cache_line[None])
        # Behind the wait: the next kernel may then read which experts were chosen before it waits itself.
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    expert_up(
        x + pair // K * hidden, gate_up, expert, h + pair * inter, hidden, inter, limit,
        ACT, LIMITED, BLOCK_N, BLOCK_M, STAGES, EVEN,
    )  # fmt: skip


@triton.jit
def _matrix_rows(experts, down, pair, n, num_experts, hidden, inter, BLOCK_M: tl.constexpr):
    """Pointers to the expert's rows n, and how many channels they have: none when there is no such expert."""
    expert = tl.load(experts + pair, cache_modifier=".cg").to(tl.int64)
    there = (expert >= 0) & (expert < num_experts)
    rows = down + (tl.where(there, expert, 0) * hidden + n[:, None]) * inter + tl.arange(0, BLOCK_M)[None]
    return rows, tl.where(there, inter, 0)


@triton.jit
def rows_down(
    h,
    down,
    weights,
    experts,
    residual,
    out,
    num_experts,
    hidden,
    inter,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] over all of the token's experts in turn; an expert's row of `down` is CHUNKS tiles of BLOCK_M."""
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    live = (n < hidden)[:, None]
    if PDL:
        gdc_launch_dependents()
    # The choice was complete before the kernel before this one let it start. A tile is always on its way.
    rows, width = _matrix_rows(experts, down, t * K, n, num_experts, hidden, inter, BLOCK_M)
    ahead = tl.load(rows, mask=live & (m < width)[None], other=0.0)
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(K, num_stages=1):
        pair = t * K + k
        held = width
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for c in tl.static_range(CHUNKS):
            now = ahead
            if c + 1 < CHUNKS:
                col = (c + 1) * BLOCK_M + m
                ahead = tl.load(rows + (c + 1) * BLOCK_M, mask=live & (col < width)[None], other=0.0)
            else:
                # behind the last expert the tile is loaded once more and left unused
                following = tl.minimum(pair + 1, t * K + K - 1)
                rows, width = _matrix_rows(experts, down, following, n, num_experts, hidden, inter, BLOCK_M)
                ahead = tl.load(rows, mask=live & (m < width)[None], other=0.0)
            at = c * BLOCK_M + m
            v = tl.load(h + pair * inter + at, mask=at < held, other=0.0).to(tl.float32)
            acc += now.to(tl.float32) * v[None]
        total += acc * tl.load(weights + pair)
    y = tl.sum(total, 1)
    if RESIDUAL:
        y += tl.load(residual + t * hidden + n, mask=n < hidden, other=0.0).to(tl.float32)
    tl.store(out + t * hidden + n, y.to(out.dtype.element_ty), mask=n < hidden)


@dataclass(frozen=True, slots=True)
class RowTile:
    """How a product of `rows_up` or `rows_down` is cut: outputs and inputs a tile, warps, and the depth of
    its pipeline, which `rows_down` has none of."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1


def rows_moe_gemm(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    num_shared: int,
    up_tile: RowTile,
    down_tile: RowTile,
) -> torch.Tensor:
    """`moe_gemm` in two launches. A token's sums are taken in one order, whatever stands beside it."""
    t, hidden = x.shape
    e, inter = gate_up.shape[0], gate_up.shape[1] // 2
    k = experts.shape[1]
    out = torch.empty_like(x)
    h = torch.empty(t * k, inter, dtype=x.dtype, device=x.device)
    workspace.launch(rows_up, (cdiv(inter, up_tile.outputs), t * k))(
        x, gate_up, experts, h, e, hidden, inter, limit or 0.0,
        K=k, SHARED=num_shared, ACT=activation, LIMITED=limit is not None, BLOCK_N=up_tile.outputs,
        BLOCK_M=up_tile.inputs,
        CACHE_LINES=next_power_of_2(cdiv(hidden, 64)), STAGES=up_tile.stages,
        EVEN=inter % up_tile.outputs == 0 and hidden % up_tile.inputs == 0,
        PDL=workspace.pdl, launch_pdl=workspace.pdl, num_warps=up_tile.warps,
    )  # fmt: skip
    workspace.launch(rows_down, (cdiv(hidden, down_tile.outputs), t))(
        h, down, weights, experts, residual, out, e, hidden, inter, K=k, RESIDUAL=residual is not None,
        CHUNKS=cdiv(inter, down_tile.inputs), BLOCK_N=down_tile.outputs, BLOCK_M=down_tile.inputs,
        PDL=workspace.pdl, launch_pdl=workspace.pdl, num_warps=down_tile.warps,
    )  # fmt: skip
    return out
