"""RMS norm in Triton (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual sum that precedes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import dependent_launch

# Channels a warp takes: few rows want their loads at once, many rows fewer warps (measured on an H200).
_LANES, _MANY_LANES, _MANY_ROWS = 512, 1024, 1024


@triton.jit
def _norm(
    p_x,
    p_residual,
    p_weight,
    p_y,
    p_h,
    E,
    x_stride,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    i_row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    m_columns = columns < E
    weight = tl.load(p_weight + columns, mask=m_columns, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    h = tl.load(p_x + i_row * x_stride + columns, mask=m_columns, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(p_residual + i_row * E + columns, mask=m_columns, other=0.0)
        h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
        tl.store(p_h + i_row * E + columns, h, mask=m_columns)
    f = h.to(tl.float32)
    y = f * tl.rsqrt(tl.sum(f * f, axis=0) / E + eps) * (weight + offset)
    tl.store(p_y + i_row * E + columns, y.to(h.dtype), mask=m_columns)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual;  y = h / sqrt(mean(h²) + eps) * (weight + offset).

    One program a row, the row in registers: one read of x and residual, one write of h and y. Shapes as in the
    reference; x's rows may be strided, residual is contiguous.
    """
    rows, channels = x.shape
    y = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    h = x if residual is None else torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(channels)
        pdl = dependent_launch(x.device)
        _norm[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            y,
            h,
            channels,
            x.stride(0),
            eps,
            offset,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=min(16, max(1, block // (_MANY_LANES if rows >= _MANY_ROWS else _LANES))),
        )
    return y, h
