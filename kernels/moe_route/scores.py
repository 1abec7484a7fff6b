# mypy: disable-error-code="no-untyped-def"
"""Scores of a few tokens: programs norm the token's row again, each for its own experts."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def row_scores(
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
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    inside = m < hidden
    rows = router + n.to(tl.int64)[:, None] * hidden + m[None, :]
    w = tl.load(rows, mask=(n < num_experts)[:, None] & inside[None, :], other=0.0)
    if NORM:
        g = tl.load(norm + m, mask=inside, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    v = tl.load(x + t * x_stride + m, mask=inside, other=0.0)
    if NORM:
        f = v.to(tl.float32)
        v = (f * tl.rsqrt(tl.sum(f * f, 0) / hidden + eps) * g).to(v.dtype)
        if tl.program_id(0) == 0:
            tl.store(h + t * hidden + m, v, mask=inside)
    score = tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], 1)
    tl.store(logits + t * num_experts + n, score, mask=n < num_experts)
