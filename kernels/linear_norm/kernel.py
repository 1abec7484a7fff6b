# mypy: disable-error-code="no-untyped-def"
"""A product and the norm behind it: on Hopper the norm adds up the product's parts, else each has its own launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import dependent_launch, group_products, multiprocessors
from kernels.linear.kernel import linear
from kernels.linear.parts import linear_parts, parts_tile
from kernels.linear.stream import streams
from kernels.rms_norm.kernel import rms_norm

# Channels a warp takes: a row's parts want their loads at once.
_LANES = 128


@triton.jit
def _sum_norm(
    parts,
    residual,
    weight,
    y,
    h,
    size,
    part_stride,
    residual_stride,
    eps,
    offset,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < size
    w = tl.load(weight + i, mask=live, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * part_stride + t * size + i, mask=live, other=0.0)
    total += tl.load(residual + t * residual_stride + i, mask=live, other=0.0).to(tl.float32)
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + t * size + i, rounded, mask=live)
    f = rounded.to(tl.float32)
    f = f * tl.rsqrt(tl.sum(f * f, 0) / size + eps) * w
    tl.store(h + t * size + i, f.to(h.dtype.element_ty), mask=live)


def sum_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = residual + Σ parts, in their order, and its norm h; parts [S, T, N], float32."""
    split, rows, size = parts.shape
    y = torch.empty(rows, size, dtype=residual.dtype, device=residual.device)
    h = torch.empty_like(y)
    block = triton.next_power_of_2(size)
    _sum_norm[(rows,)](
        parts, residual, weight, y, h, size, parts.stride(0), residual.stride(0), eps, offset, SPLIT=split,
        BLOCK=block, PDL=pdl, launch_pdl=pdl, num_warps=min(16, max(1, block // _LANES)),
    )  # fmt: skip
    return y, h


def linear_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. residual is contiguous along its rows."""
    if group_products(x.device) and bias is None and streams(x, weight):
        n, k = weight.shape
        tile = parts_tile(len(x), n, k, multiprocessors(x.device))
        if tile is not None:
            pdl = dependent_launch(x.device)
            return sum_norm(linear_parts(x, weight, tile, pdl), residual, norm_weight, eps, offset, pdl)
    y = linear(x, weight, bias, residual=residual)
    return y, rms_norm(y, norm_weight, eps, offset=offset)[0]
