# mypy: disable-error-code="no-untyped-def"
"""From residual streams to the input of a layer part, in two kernels: the products over slices of a token's values, on
the tensor cores, then their sum, the small matrices and the mix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

ROWS = 64
SLICE = 128
# Slices of a token's values where no number of tokens may decide: enough programs for one token.
INVARIANT_SLICES = 32


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["tokens"])
def _products(
    streams,
    fn,
    partials,
    tokens,
    width,
    reach,
    OUTPUTS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials[slice, t] holds a slice's products with the rows of fn, then its sum of squares."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin = tl.program_id(1) * reach
    o = tl.arange(0, BLOCK_O)
    i = tl.arange(0, SLICE)
    rows = streams + t.to(tl.int64)[:, None] * width
    m_t = (t < tokens)[:, None]
    m_o = (o < OUTPUTS)[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    end = tl.minimum(begin + reach, width)
    # The weight's slice is on its way before the streams are there.
    w = tl.load(fn + o[:, None] * width + begin + i[None], mask=m_o & (begin + i < end)[None], other=0.0)
    if PDL:
        gdc_wait()
    for first in range(begin, end, SLICE):
        x = tl.load(rows + first + i[None], mask=m_t & (first + i < end)[None], other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        ahead = first + SLICE + i
        w = tl.load(fn + o[:, None] * width + ahead[None], mask=m_o & (ahead < end)[None], other=0.0)
    place = partials + (tl.program_id(1).to(tl.int64) * tokens + t) * (OUTPUTS + 1)
    tl.store(place[:, None] + o[None], acc, mask=m_t & (o < OUTPUTS)[None])
    tl.store(place + OUTPUTS, squares, mask=t < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _mix(
    streams,
    partials,
    base,
    scale,
    out,
    post,
    comb,
    tokens,
    hidden,
    norm_eps,
    eps,
    SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (token, 0) give post and comb, (token, i) the i-th part of the mix: its loads and stores and the rounds
    of divisions behind comb, which take as long, run beside each other."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    s = tl.arange(0, BLOCK_S)
    small = n < N
    outputs: tl.constexpr = N * (2 + N)
    slices = partials + (s.to(tl.int64) * tokens + t) * (outputs + 1)
    there = s < SLICES
    if tl.program_id(1) == 0:
        base_post = tl.load(base + N + n, mask=small, other=0.0)
        scale_post = tl.load(scale + 1)
        row = n[:, None] * N + n[None]
        square = small[:, None] & small[None]
        base_comb = tl.load(base + 2 * N + row, mask=square, other=0.0)
        scale_comb = tl.load(scale + 2)
        if PDL:
            gdc_wait()
        unit = tl.rsqrt(tl.sum(tl.load(slices + outputs, mask=there, other=0.0), 0) / (N * hidden) + norm_eps)
        m_comb = tl.load(slices[:, None, None] + 2 * N + row[None], mask=there[:, None, None] & square[None], other=0.0)
        m_post = tl.sum(tl.load(slices[:, None] + N + n[None], mask=there[:, None] & small[None], other=0.0), 0)
        y = 2.0 * _sigmoid(m_post * unit * scale_post + base_post)
        tl.store(post + t * N + n, y, mask=small)
        c = tl.sum(m_comb, 0) * unit * scale_comb + base_comb
        c = tl.where(square, c, float("-inf"))
        top = tl.max(c, 1)
        c = tl.exp(c - tl.where(top == float("-inf"), 0.0, top)[:, None])
        c = c / tl.where(small, tl.sum(c, 1), 1.0)[:, None]
        c = tl.where(square, c + eps, 0.0)
        c = c / (tl.sum(c, 0) + eps)[None]
        for _ in range(ITERATIONS - 1):
            c = c / (tl.sum(c, 1) + eps)[:, None]
            c = c / (tl.sum(c, 0) + eps)[None]
        tl.store(comb + t * N * N + row, c, mask=square)
    else:
        base_pre = tl.load(base + n, mask=small, other=0.0)
        scale_pre = tl.load(scale)
        j = (tl.program_id(1) - 1) * BLOCK_E + tl.arange(0, BLOCK_E)
        if PDL:
            gdc_wait()
        unit = tl.rsqrt(tl.sum(tl.load(slices + outputs, mask=there, other=0.0), 0) / (N * hidden) + norm_eps)
        m_pre = tl.sum(tl.load(slices[:, None] + n[None], mask=there[:, None] & small[None], other=0.0), 0)
        pre = _sigmoid(m_pre * unit * scale_pre + base_pre) + eps
        mixed = tl.load(
            streams + (t * N + n)[:, None] * hidden + j[None], mask=small[:, None] & (j < hidden)[None], other=0.0
        )
        mixed = tl.sum(mixed.to(tl.float32) * pre[:, None], 0)
        tl.store(out + t * hidden + j, mixed.to(out.dtype.element_ty), mask=j < hidden)


def _slices(tokens: int, width: int, processors: int) -> int:
    """Into how many slices the values of a token are cut: enough programs for the machine, as few as do."""
    wanted = max(1, 2 * processors // cdiv(tokens, ROWS))
    return min(next_power_of_2(wanted), 128, cdiv(width, SLICE))


def hyper_mix(
    workspace: Workspace,
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    iterations: int,
    eps: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference. The weight is rounded to tf32, but for float32 streams."""
    t, n, hidden = streams.shape
    streams = streams.contiguous()
    out = torch.empty(t, hidden, dtype=streams.dtype, device=streams.device)
    post = torch.empty(t, n, dtype=torch.float32, device=streams.device)
    comb = torch.empty(t, n, n, dtype=torch.float32, device=streams.device)
    if not t:
        return out, post, comb
    width, outputs = n * hidden, n * (2 + n)
    slices = _slices(t, width, multiprocessors(streams.device))
    if deterministic:
        slices = min(INVARIANT_SLICES, cdiv(width, SLICE))
    reach = cdiv(cdiv(width, slices), SLICE) * SLICE
    slices = cdiv(width, reach)
    partials = torch.empty(slices, t, outputs + 1, dtype=torch.float32, device=streams.device)
    pdl = workspace.pdl
    workspace.launch(_products, (cdiv(t, ROWS), slices))(
        streams,
        fn,
        partials,
        t,
        width,
        reach,
        OUTPUTS=outputs,
        BLOCK_O=max(16, next_power_of_2(outputs)),
        BLOCK_T=ROWS,
        SLICE=SLICE,
        PRECISION="tf32x3" if streams.dtype == torch.float32 else "tf32",
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    block_e = min(1024, next_power_of_2(hidden))
    workspace.launch(_mix, (t, 1 + cdiv(hidden, block_e)))(
        streams,
        partials,
        base,
        scale,
        out,
        post,
        comb,
        t,
        hidden,
        norm_eps,
        eps,
        SLICES=slices,
        BLOCK_S=next_power_of_2(slices),
        ITERATIONS=iterations,
        N=n,
        BLOCK_N=next_power_of_2(n),
        BLOCK_E=block_e,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out, post, comb
