# mypy: disable-error-code="no-untyped-def"
"""Scores of a decode step: each program has its part of the router in registers before it waits for the normed rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Tokens, experts and inputs of a program: few enough that it fits a multiprocessor beside the product before it.
_TOKENS, _EXPERTS, _INPUTS = 16, 32, 256


@triton.jit
def _cut(x):
    """The upper half of a float32's bits as bfloat16, and the rest, exactly."""
    upper = x.to(tl.int32, bitcast=True) & -65536
    return (upper >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - upper.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def step_scores(
    h,
    router,
    partials,
    counts,
    tokens,
    num_experts,
    counters,
    hidden,
    h_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials[split] = h · routerᵀ over the split's BLOCK_M inputs; counts [counters] = 0. The router is float32 or of
    the dtype of h."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (t < tokens)[:, None]
    inside = (m < hidden)[None, :]
    rows = router + n.to(tl.int64)[:, None] * hidden + m[None, :]
    w = tl.load(rows, mask=(n < num_experts)[:, None] & inside, other=0.0)
    NARROW: tl.constexpr = router.dtype.element_ty == tl.bfloat16
    EXACT: tl.constexpr = not NARROW and h.dtype.element_ty == tl.bfloat16
    if EXACT:
        # Three bfloat16 values whose sum is the router's, to its last bit: products with h are exact.
        high, rest = _cut(w)
        middle, rest = _cut(rest)
        low, _ = _cut(rest)
    if PDL:
        gdc_wait()
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        e = tl.arange(0, BLOCK_E)
        tl.store(counts + e, tl.zeros((BLOCK_E,), tl.int32), mask=e < counters)
    a = tl.load(h + t[:, None] * h_stride + m[None, :], mask=live & inside, other=0.0)
    if NARROW:
        acc = tl.dot(a, tl.trans(w))
    elif EXACT:
        acc = tl.dot(a, tl.trans(low)) + tl.dot(a, tl.trans(middle)) + tl.dot(a, tl.trans(high))
    else:
        acc = tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
    place = (tl.program_id(2).to(tl.int64) * tokens + t[:, None]) * num_experts + n[None, :]
    tl.store(partials + place, acc, mask=live & (n < num_experts)[None, :])


def scored(
    workspace: Workspace, h: torch.Tensor, router: torch.Tensor, num_shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """h · routerᵀ as [splits, T, E] float32 to be summed, and E + S int32 zeros."""
    (t, hidden), e = h.shape, len(router)
    splits = cdiv(hidden, _INPUTS)
    partials = torch.empty(splits, t, e, dtype=torch.float32, device=h.device)
    counts = torch.empty(e + num_shared, dtype=torch.int32, device=h.device)
    workspace.launch(step_scores, (cdiv(t, _TOKENS), cdiv(e, _EXPERTS), splits))(
        h, router, partials, counts, t, e, len(counts), hidden, h.stride(0), BLOCK_T=_TOKENS, BLOCK_N=_EXPERTS,
        BLOCK_M=_INPUTS, BLOCK_E=next_power_of_2(len(counts)), PDL=workspace.pdl, launch_pdl=workspace.pdl, num_warps=4,
    )  # fmt: skip
    return partials, counts
