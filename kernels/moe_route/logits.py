# mypy: disable-error-code="no-untyped-def"
"""Scores of many tokens on tensor cores: float32 routers as three bfloat16 ones, inputs split over programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import shared_bytes
from kernels.pipeline import fitting_stages
from kernels.prefetch import prefetch
from kernels.sizes import cdiv
from kernels.workspace import Workspace

# Tokens of a tile of many.
ROUTED_TOKENS = 64
# From here on the scores are exact products of bfloat16 on tensor cores.
BF16_THIRDS_TOKENS = 1024
# Up to here the inputs of such products are split over programs, so that they fill a GPU.
FULL_TOKENS = 4096


@triton.jit(do_not_specialize=["tokens"])
def _scores(
    h,
    router,
    partials,
    tokens,
    num_experts,
    hidden,
    h_stride,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials[split] = h · routerᵀ over the split's share of the inputs, of which the router's first AHEAD are asked
    for before the kernel before has finished."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    split_size = tl.cdiv(tl.cdiv(hidden, SPLITS), BLOCK_M) * BLOCK_M
    start = tl.program_id(2) * split_size
    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            APART: tl.constexpr = 1024 // router.dtype.element_ty.primitive_bitwidth
            asked = tl.minimum(start + tl.arange(0, AHEAD // APART) * APART, hidden - 1)
            prefetch(router + tl.minimum(n, num_experts - 1).to(tl.int64)[:, None] * hidden + asked[None, :])
        gdc_wait()
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for first in range(start, tl.minimum(start + split_size, hidden), BLOCK_M):
        col = first + m
        inside = col < hidden
        a = tl.load(h + t[:, None] * h_stride + col[None, :], mask=(t < tokens)[:, None] & inside[None, :], other=0.0)
        w = tl.load(
            router + n.to(tl.int64)[:, None] * hidden + col[None, :],
            mask=(n < num_experts)[:, None] & inside[None, :],
            other=0.0,
        )
        acc = tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)), acc, input_precision=PRECISION)
    place = (tl.program_id(2).to(tl.int64) * tokens + t[:, None]) * num_experts + n[None, :]
    tl.store(partials + place, acc, mask=(t < tokens)[:, None] & (n < num_experts)[None, :])


@triton.jit
def _thirds(router, partials, size, BLOCK: tl.constexpr):
    """Three bfloat16 values whose sum is the router's, to its last bit: partials[i] for i = 0, 1, 2."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(router + i, mask=i < size, other=0.0)
    for part in tl.static_range(3):
        rounded = w.to(tl.bfloat16)
        tl.store(partials + part * size.to(tl.int64) + i, rounded, mask=i < size)
        w -= rounded.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _many_scores(
    h,
    thirds,
    partials,
    tokens,
    num_experts,
    hidden,
    h_stride,
    THIRDS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials[split] = h · (sum of thirds)ᵀ over the split's share of the inputs: exact products of bfloat16 values,
    summed in float32. THIRDS is 1 where the router itself is bfloat16."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    rows = thirds + tl.minimum(n, num_experts - 1).to(tl.int64)[:, None] * hidden
    third = num_experts.to(tl.int64) * hidden
    own = h + tl.minimum(t, tokens - 1)[:, None] * h_stride
    split_size = tl.cdiv(tl.cdiv(hidden, SPLITS), BLOCK_M) * BLOCK_M
    start = tl.program_id(2) * split_size
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for first in range(start, tl.minimum(start + split_size, hidden), BLOCK_M):
        col = (first + m)[None, :]
        inside = col < hidden
        a = tl.load(own + col, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(tl.load(rows + col, mask=inside, other=0.0)), acc)
        if THIRDS == 3:
            acc = tl.dot(a, tl.trans(tl.load(rows + third + col, mask=inside, other=0.0)), acc)
            acc = tl.dot(a, tl.trans(tl.load(rows + 2 * third + col, mask=inside, other=0.0)), acc)
    place = (tl.program_id(2).to(tl.int64) * tokens + t[:, None]) * num_experts + n[None, :]
    tl.store(partials + place, acc, mask=(t < tokens)[:, None] & (n < num_experts)[None, :])


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """How the scores of many tokens are cut, 64 tokens a tile: inputs of a slice, programs that share the inputs, and
    the depth of the pipeline where it fits."""

    inputs: int
    splits: int
    stages: int


def score_tile(tokens: int, exact: bool) -> ScoreTile:
    """`exact`: the router is one table, not three."""
    if tokens > FULL_TOKENS:
        return ScoreTile(128, 1, 4) if exact else ScoreTile(64, 1, 3)
    return ScoreTile(128 if exact else 64, 4, 3)


def score_cut(tokens: int) -> tuple[int, int, int, int, int]:
    """Tokens, experts and inputs of a tile of `_scores`, programs that share the inputs, and inputs asked for ahead.
    One tile of tokens needs programs enough to bring the router in fast. Not a cut for each number of tokens: each is
    compiled."""
    if tokens <= 16:
        return 16, 32, 128, 8, 512
    return (16, 64, 64, 8, 0) if tokens <= 256 else (64, 64, 32, 2, 0)


def logit_partials(workspace: Workspace, h: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """h · routerᵀ in float32 as [splits, T, E] to be summed."""
    (t, hidden), e = h.shape, router.shape[0]
    if t >= BF16_THIRDS_TOKENS and h.dtype == torch.bfloat16:
        thirds, exact = router, router.dtype == h.dtype
        if not exact:
            thirds = torch.empty(3, e, hidden, dtype=h.dtype, device=h.device)
            workspace.launch(_thirds, (cdiv(e * hidden, 1024),))(router, thirds, e * hidden, BLOCK=1024)
        tile = score_tile(t, exact)
        block_n = 128 if e > 64 else 64
        loaded = (ROUTED_TOKENS + (1 if exact else 3) * block_n) * tile.inputs * h.element_size()
        partials = torch.empty(tile.splits, t, e, dtype=torch.float32, device=h.device)
        workspace.launch(_many_scores, (cdiv(t, ROUTED_TOKENS), cdiv(e, block_n), tile.splits))(
            h, thirds, partials, t, e, hidden, h.stride(0), THIRDS=1 if exact else 3, SPLITS=tile.splits,
            BLOCK_T=ROUTED_TOKENS, BLOCK_N=block_n, BLOCK_M=tile.inputs, PDL=workspace.pdl, launch_pdl=workspace.pdl,
            num_warps=4, num_stages=fitting_stages(tile.stages, loaded, shared_bytes(h.device)),
        )  # fmt: skip
        return partials
    block_t, block_n, block_m, splits, ahead = score_cut(t)
    partials = torch.empty(splits, t, e, dtype=torch.float32, device=h.device)
    workspace.launch(_scores, (cdiv(t, block_t), cdiv(e, block_n), splits))(
        h, router, partials, t, e, hidden, h.stride(0),
        SPLITS=splits, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_M=block_m, AHEAD=ahead,
        PRECISION="ieee" if h.dtype == torch.float32 else "tf32x3", PDL=workspace.pdl, launch_pdl=workspace.pdl,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return partials
