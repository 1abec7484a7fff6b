"""From residual streams to the input of a layer part: the products by a library, the rest one program a token, with its
small matrices in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _mix(
    streams,
    products,
    base,
    scale,
    out,
    post,
    comb,
    hidden,
    norm_eps,
    eps,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    width = N * hidden
    x_row = streams + t * width
    i = tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    row = 2 * N + n[:, None] * N + n[None]
    small = n < N
    square = small[:, None] & small[None]
    squares = tl.zeros((BLOCK_E,), tl.float32)
    for first in range(0, width, BLOCK_E):
        x = tl.load(x_row + first + i, mask=first + i < width, other=0.0).to(tl.float32)
        squares += x * x
    m_row = products + t * N * (2 + N)
    m_pre = tl.load(m_row + n, mask=small, other=0.0)
    m_post = tl.load(m_row + N + n, mask=small, other=0.0)
    m_comb = tl.load(m_row + row, mask=square, other=0.0)
    unit = tl.rsqrt(tl.sum(squares, 0) / width + norm_eps)

    pre = _sigmoid(m_pre * unit * tl.load(scale) + tl.load(base + n, mask=small, other=0.0)) + eps
    y = 2.0 * _sigmoid(m_post * unit * tl.load(scale + 1) + tl.load(base + N + n, mask=small, other=0.0))
    tl.store(post + t * N + n, y, mask=small)
    c = m_comb * unit * tl.load(scale + 2) + tl.load(base + row, mask=square, other=0.0)
    c = tl.where(square, c, float("-inf"))
    top = tl.max(c, 1)
    c = tl.exp(c - tl.where(top == float("-inf"), 0.0, top)[:, None])
    c = c / tl.where(small, tl.sum(c, 1), 1.0)[:, None]
    c = tl.where(square, c + eps, 0.0)
    c = c / (tl.sum(c, 0) + eps)[None]
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, 1) + eps)[:, None]
        c = c / (tl.sum(c, 0) + eps)[None]
    tl.store(comb + t * N * N + n[:, None] * N + n[None], c, mask=square)

    for first in range(0, hidden, BLOCK_E):
        j = first + i
        parts = tl.load(x_row + n[:, None] * hidden + j[None], mask=small[:, None] & (j < hidden)[None], other=0.0)
        mixed = tl.sum(parts.to(tl.float32) * pre[:, None], 0)
        tl.store(out + t * hidden + j, mixed.to(out.dtype.element_ty), mask=j < hidden)


def hyper_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    iterations: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference."""
    t, n, hidden = streams.shape
    streams = streams.contiguous()
    out = torch.empty(t, hidden, dtype=streams.dtype, device=streams.device)
    post = torch.empty(t, n, dtype=torch.float32, device=streams.device)
    comb = torch.empty(t, n, n, dtype=torch.float32, device=streams.device)
    if t:
        _mix[(t,)](
            streams,
            streams.flatten(1).float() @ fn.T,
            base,
            scale,
            out,
            post,
            comb,
            hidden,
            norm_eps,
            eps,
            ITERATIONS=iterations,
            N=n,
            BLOCK_N=triton.next_power_of_2(n),
            BLOCK_E=512,
            num_warps=8,
        )
    return out, post, comb
