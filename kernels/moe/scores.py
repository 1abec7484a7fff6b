# mypy: disable-error-code="no-untyped-def"
"""Norm and scores of a decode step in one launch: each program norms its tokens' rows again, for its own share of the
inputs and of the experts, whose part of the router it has in registers before it waits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Tokens, experts and inputs of a program; values of a row that are squared at once.
_TOKENS, _EXPERTS, _INPUTS, _CHUNK = 16, 32, 256, 256
# Every program reads whole rows to norm them: larger routers have too many programs for that.
MOST_VALUES = 1 << 19


@triton.jit(do_not_specialize=["tokens"])
def step_scores(
    x,
    norm,
    router,
    h,
    parts,
    counts,
    tokens,
    num_experts,
    counters,
    hidden,
    x_stride,
    eps,
    offset,
    NORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts[split] = h · routerᵀ over the split's BLOCK_M inputs; h = norm(x), or x itself; counts [counters] = 0.
    CHUNKS of BLOCK_C values hold a row."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (t < tokens)[:, None]
    inside = (m < hidden)[None, :]
    rows = router + n.to(tl.int64)[:, None] * hidden + m[None, :]
    w = tl.load(rows, mask=(n < num_experts)[:, None] & inside, other=0.0)
    EXACT: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    if EXACT:
        # Three bfloat16 values whose sum is the router's, to its last bit: products with h are exact.
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    if NORM:
        g = tl.load(norm + m, mask=m < hidden, other=0.0).to(tl.float32)[None, :] + offset
    if PDL:
        gdc_wait()
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        e = tl.arange(0, BLOCK_E)
        tl.store(counts + e, tl.zeros((BLOCK_E,), tl.int32), mask=e < counters)
    a = tl.load(x + t[:, None] * x_stride + m[None, :], mask=live & inside, other=0.0)
    if NORM:
        squares = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            c = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
            row = tl.load(x + t[:, None] * x_stride + c[None, :], mask=live & (c < hidden)[None, :], other=0.0)
            f = row.to(tl.float32)
            squares += f * f
        a = (a.to(tl.float32) * tl.rsqrt(tl.sum(squares, 1) / hidden + eps)[:, None] * g).to(a.dtype)
        if tl.program_id(1) == 0:
            tl.store(h + t[:, None] * hidden + m[None, :], a, mask=live & inside)
    if EXACT:
        acc = tl.dot(a, tl.trans(low))
        acc = tl.dot(a, tl.trans(middle), acc)
        acc = tl.dot(a, tl.trans(high), acc)
    else:
        acc = tl.dot(a.to(tl.float32), tl.trans(w), input_precision="ieee")
    place = (tl.program_id(2).to(tl.int64) * tokens + t[:, None]) * num_experts + n[None, :]
    tl.store(parts + place, acc, mask=live & (n < num_experts)[None, :])


def normed_scores(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    router: torch.Tensor,
    num_shared: int,
    pdl: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h, x normed or x itself [T, M]; h · routerᵀ as [splits, T, E] float32 to be summed; E + S int32 zeros."""
    (t, hidden), e = x.shape, len(router)
    splits = triton.cdiv(hidden, _INPUTS)
    h = x if norm_weight is None else torch.empty(t, hidden, dtype=x.dtype, device=x.device)
    parts = torch.empty(splits, t, e, dtype=torch.float32, device=x.device)
    counts = torch.empty(e + num_shared, dtype=torch.int32, device=x.device)
    step_scores[(triton.cdiv(t, _TOKENS), triton.cdiv(e, _EXPERTS), splits)](
        x, norm_weight, router, h, parts, counts, t, e, len(counts), hidden, x.stride(0), eps, offset,
        NORM=norm_weight is not None, CHUNKS=triton.cdiv(hidden, _CHUNK), BLOCK_C=_CHUNK, BLOCK_T=_TOKENS,
        BLOCK_N=_EXPERTS, BLOCK_M=_INPUTS, BLOCK_E=triton.next_power_of_2(len(counts)), PDL=pdl, launch_pdl=pdl,
        num_warps=4,
    )  # fmt: skip
    return h, parts, counts
