# mypy: disable-error-code="no-untyped-def"
"""A residual sum behind an RMS norm: one program a row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace


@triton.jit
def _norm_add(
    x, weight, residual, y, size, x_stride, residual_stride, eps, offset, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < size
    w = tl.load(weight + i, mask=live, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    f = tl.load(x + t * x_stride + i, mask=live, other=0.0).to(tl.float32)
    before = tl.load(residual + t * residual_stride + i, mask=live, other=0.0).to(tl.float32)
    f = f * tl.rsqrt(tl.sum(f * f, 0) / size + eps) * w
    tl.store(y + t * size + i, (before + f).to(y.dtype.element_ty), mask=live)


def norm_add(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    """See the reference; rounds once. Rows may be strided."""
    rows, size = x.shape
    y = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        block = next_power_of_2(size)
        pdl = workspace.pdl
        workspace.launch(_norm_add, (rows,))(
            x,
            weight,
            residual,
            y,
            size,
            x.stride(0),
            residual.stride(0),
            eps,
            offset,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=min(16, max(1, block // 512)),
        )
    return y
