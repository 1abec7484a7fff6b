"""Feed-forward parts of the routed experts.

Few pairs of token and expert, or a call whose rows must not depend on each other: each pair reads its expert's
matrices row by row, straight from memory. Many pairs: they are sorted by expert and cut into tiles of one expert
each, whose number only the device knows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_PAIRS = 64


@triton.jit
def _activate(g, u, limit, GELU: tl.constexpr, LIMITED: tl.constexpr):
    if LIMITED:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
    if GELU:
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        # tanh(z) = 1 − 2 / (e²ᶻ + 1)
        return 0.5 * g * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)) * u
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit
def _few_up(
    x,
    gate_up,
    experts,
    h,
    num_experts,
    hidden,
    inter,
    limit,
    K: tl.constexpr,
    GELU: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    m = tl.arange(0, BLOCK_M)
    gate_rows = gate_up + (expert * 2 * inter + n[:, None]) * hidden
    up_rows = gate_rows + inter * hidden
    g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, hidden, BLOCK_M):
        inside = (n[:, None] < inter) & (first + m[None] < hidden)
        v = tl.load(x + pair // K * hidden + first + m, mask=first + m < hidden, other=0.0).to(tl.float32)
        g += tl.load(gate_rows + first + m[None], mask=inside, other=0.0).to(tl.float32) * v[None]
        u += tl.load(up_rows + first + m[None], mask=inside, other=0.0).to(tl.float32) * v[None]
    y = _activate(tl.sum(g, 1), tl.sum(u, 1), limit, GELU, LIMITED)
    tl.store(h + pair * inter + n, y.to(h.dtype.element_ty), mask=n < inter)


@triton.jit
def _few_down(
    h,
    down,
    weights,
    experts,
    y,
    num_experts,
    hidden,
    inter,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    m = tl.arange(0, BLOCK_M)
    rows = down + (expert * hidden + n[:, None]) * inter
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, inter, BLOCK_M):
        inside = (n[:, None] < hidden) & (first + m[None] < inter)
        v = tl.load(h + pair * inter + first + m, mask=first + m < inter, other=0.0).to(tl.float32)
        acc += tl.load(rows + first + m[None], mask=inside, other=0.0).to(tl.float32) * v[None]
    total = tl.load(weights + pair) * tl.sum(acc, 1)
    tl.store(y + pair * hidden + n, total, mask=n < hidden)


@triton.jit
def _tile_up(
    x,
    gate_up,
    order,
    offsets,
    tile_start,
    tile_expert,
    h,
    num_experts,
    hidden,
    inter,
    limit,
    K: tl.constexpr,
    GELU: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= num_experts:
        return
    last = tl.load(offsets + expert + 1)
    place = tl.load(offsets + expert) + (tile - tl.load(tile_start + expert)) * BLOCK_P + tl.arange(0, BLOCK_P)
    token = tl.load(order + place, mask=place < last, other=0).to(tl.int64) // K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    gate_rows = gate_up + (expert * 2 * inter + n[None]) * hidden
    up_rows = gate_rows + inter * hidden
    g = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    u = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in range(0, hidden, BLOCK_M):
        col = first + m
        inside = (n[None] < inter) & (col[:, None] < hidden)
        a = tl.load(x + token[:, None] * hidden + col[None], mask=(place < last)[:, None] & (col < hidden), other=0.0)
        g = tl.dot(a, tl.load(gate_rows + col[:, None], mask=inside, other=0.0), g, input_precision=PRECISION)
        u = tl.dot(a, tl.load(up_rows + col[:, None], mask=inside, other=0.0), u, input_precision=PRECISION)
    y = _activate(g, u, limit, GELU, LIMITED)
    rows = h + place.to(tl.int64)[:, None] * inter + n[None]
    tl.store(rows, y.to(h.dtype.element_ty), mask=(place < last)[:, None] & (n < inter)[None])


@triton.jit
def _tile_down(
    h,
    down,
    weights,
    order,
    offsets,
    tile_start,
    tile_expert,
    y,
    num_experts,
    hidden,
    inter,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= num_experts:
        return
    last = tl.load(offsets + expert + 1)
    place = tl.load(offsets + expert) + (tile - tl.load(tile_start + expert)) * BLOCK_P + tl.arange(0, BLOCK_P)
    pair = tl.load(order + place, mask=place < last, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    rows = down + (expert * hidden + n[None]) * inter
    acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in range(0, inter, BLOCK_M):
        col = first + m
        source = h + place.to(tl.int64)[:, None] * inter + col[None]
        a = tl.load(source, mask=(place < last)[:, None] & (col < inter)[None], other=0.0)
        b = tl.load(rows + col[:, None], mask=(n[None] < hidden) & (col[:, None] < inter), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    acc *= tl.load(weights + pair, mask=place < last, other=0.0)[:, None]
    tl.store(y + pair[:, None] * hidden + n[None], acc, mask=(place < last)[:, None] & (n < hidden)[None])


@triton.jit
def _combine(y, experts, out, num_experts, hidden, K: tl.constexpr, BLOCK_N: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k in range(K):
        expert = tl.load(experts + t * K + k)
        there = tl.where((expert >= 0) & (expert < num_experts), hidden, 0)
        total += tl.load(y + (t * K + k) * hidden + n, mask=n < there, other=0.0)
    tl.store(out + t * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)


def moe_gemm(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
    limit: float | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See the reference. Every shape that a launch depends on is known to the host, so that graphs can hold it."""
    t, hidden = x.shape
    e, inter = gate_up.shape[0], gate_up.shape[1] // 2
    k = experts.shape[1]
    pairs = t * k
    out = torch.empty_like(x)
    if not t:
        return out
    x, experts = x.contiguous(), experts.contiguous()
    gelu, limited, bound = activation != "silu", limit is not None, limit or 0.0
    h = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    if pairs <= FEW_PAIRS or deterministic:
        # Small tiles: many programs with few steps each keep the memory busy.
        _few_up[(pairs, triton.cdiv(inter, 8))](
            x, gate_up, experts, h, e, hidden, inter, bound, K=k, GELU=gelu, LIMITED=limited, BLOCK_N=8, BLOCK_M=512
        )
        _few_down[(pairs, triton.cdiv(hidden, 16))](
            h, down, weights, experts, y, e, hidden, inter, BLOCK_N=16, BLOCK_M=256
        )
        _combine[(t, triton.cdiv(hidden, 256))](y, experts, out, e, hidden, K=k, BLOCK_N=256, num_warps=2)
        return out
    block_p = min(128, max(16, triton.next_power_of_2(pairs // e)))
    flat = experts.flatten()
    flat = torch.where((flat < 0) | (flat >= e), e, flat)
    ranked, order = torch.sort(flat, stable=True)
    bounds = torch.arange(e + 1, dtype=torch.int32, device=x.device)
    offsets = torch.searchsorted(ranked, bounds, out_int32=True)
    tiles = (offsets.diff() + block_p - 1) // block_p
    ends = tiles.cumsum(0, dtype=torch.int32)
    tile_start = ends - tiles
    most = min(pairs, triton.cdiv(pairs, block_p) + e)
    tile_expert = torch.searchsorted(
        ends, torch.arange(most, dtype=torch.int32, device=x.device), right=True, out_int32=True
    )
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    block_n, block_m = (64, 32) if x.dtype == torch.float32 else (128, 64)
    wide = 8 if block_p >= 64 else 4
    _tile_up[(triton.cdiv(inter, block_n), most)](
        x,
        gate_up,
        order,
        offsets,
        tile_start,
        tile_expert,
        h,
        e,
        hidden,
        inter,
        bound,
        K=k,
        GELU=gelu,
        LIMITED=limited,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        PRECISION=precision,
        num_warps=wide,
    )
    _tile_down[(triton.cdiv(hidden, block_n), most)](
        h,
        down,
        weights,
        order,
        offsets,
        tile_start,
        tile_expert,
        y,
        e,
        hidden,
        inter,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        PRECISION=precision,
        num_warps=wide,
    )
    _combine[(t, triton.cdiv(hidden, 1024))](y, experts, out, e, hidden, K=k, BLOCK_N=1024)
    return out
