"""RMS norm in Triton (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual sum that precedes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace

# Channels a warp takes: few rows want their loads at once, parts of rows even more, many rows fewer warps (measured on
# an H200).
_LANES, _PARTIAL_LANES, _MANY_LANES, _MANY_ROWS = 512, 128, 1024, 1024


@triton.jit
def _norm(
    p_x,
    p_residual,
    p_weight,
    p_y,
    p_h,
    E,
    partial_stride,
    x_stride,
    residual_stride,
    eps,
    offset,
    SPLIT: tl.constexpr,
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
    for split in tl.static_range(1, SPLIT):
        h += tl.load(p_x + split * partial_stride + i_row * x_stride + columns, mask=m_columns, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(p_residual + i_row * residual_stride + columns, mask=m_columns, other=0.0)
        h = (h.to(tl.float32) + residual.to(tl.float32)).to(p_h.dtype.element_ty)
        tl.store(p_h + i_row * E + columns, h, mask=m_columns)
    f = h.to(tl.float32)
    y = f * tl.rsqrt(tl.sum(f * f, axis=0) / E + eps) * (weight + offset)
    tl.store(p_y + i_row * E + columns, y.to(h.dtype), mask=m_columns)


def rms_norm(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual;  y = h / sqrt(mean(h²) + eps) * (weight + offset).

    One program a row, the row in registers: one read of x and residual, one write of h and y. Shapes as in the
    reference; rows of x and residual may be strided. How many warps share a row decides in which order it is summed.
    """
    many = len(x) >= _MANY_ROWS and not deterministic
    return _normed(workspace, x, weight, eps, residual, offset, _MANY_LANES if many else _LANES)


def sum_norm(
    workspace: Workspace,
    partials: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x = Σ parts [S, T, E], float32, in their order: y and h in residual's dtype."""
    return _normed(workspace, partials, weight, eps, residual, offset, _PARTIAL_LANES)


def _normed(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    offset: float,
    lanes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, E], or parts of it [S, T, E]; a warp takes `lanes` channels."""
    rows, channels = x.shape[-2:]
    like = x if residual is None else residual
    y = torch.empty((rows, channels), dtype=like.dtype, device=x.device)
    h = x if residual is None else torch.empty_like(y)
    if rows:
        block = next_power_of_2(channels)
        pdl = workspace.pdl
        workspace.launch(_norm, (rows,))(
            x,
            like,
            weight,
            y,
            h,
            channels,
            x.stride(0),
            x.stride(-2),
            like.stride(0),
            eps,
            offset,
            SPLIT=1 if x.dim() == 2 else len(x),
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=min(16, max(1, block // lanes)),
        )
    return y, h
