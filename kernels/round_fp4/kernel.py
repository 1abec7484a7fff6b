# mypy: disable-error-code="no-untyped-def"
"""Inputs of a product of 4-bit floats, one program a row: its norm, scales and rounding in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.quantize.kernel import LANES, input_row
from kernels.sizes import next_power_of_2
from kernels.weight.inputs import FP4_MAX, FP8_MAX, Inputs
from kernels.workspace import Workspace


@triton.jit
def _round(
    p_x, p_norm, p_scale, p_y,
    K, x_stride, eps, offset,
    NORM: tl.constexpr, FINE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    LARGEST: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row `program_id(0)` of x; GROUP inputs share a scale, and BLOCK covers them all."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    f = input_row(p_x + row * x_stride, p_norm, k, inside, K, eps, offset, NORM, PDL)
    parts = tl.reshape(f, (BLOCK // GROUP, GROUP))
    largest = tl.max(tl.abs(parts), axis=1)
    if FINE:
        factor = tl.load(p_scale) + tl.zeros((BLOCK // GROUP,), tl.float32)
        span = tl.full((BLOCK // GROUP,), LARGEST, tl.float32)
        fine = tl.minimum(tl.div_rn(tl.div_rn(largest, span), factor), SPAN)
        scale = fine.to(tl.float8e4nv).to(tl.float32) * factor
    else:
        # The exponent alone, one more from three quarters of the way to the next power on.
        bits = largest.to(tl.int32, bitcast=True) + 0x200000
        scale = (bits & 0x7F800000).to(tl.float32, bitcast=True) * 0.25
    wide = tl.broadcast_to(scale[:, None], parts.shape)
    ratio = tl.where(wide == 0.0, 0.0, tl.div_rn(parts, tl.where(wide == 0.0, 1.0, wide)))
    ratio = tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST)
    size = tl.abs(ratio)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    # Of what is below 2^22, this sum keeps whole numbers, to nearest and ties to even.
    whole = (tl.div_rn(ratio, step) + 12582912.0) - 12582912.0
    y = tl.reshape(whole * step * wide, (BLOCK,))
    tl.store(p_y + row * K + k, y.to(p_y.dtype.element_ty), mask=inside)


def round_fp4(
    workspace: Workspace,
    x: torch.Tensor,
    inputs: Inputs,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> torch.Tensor:
    """See the reference. Rows of x may be strided."""
    rows, k = x.shape
    y = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    if rows:
        block = next_power_of_2(k)
        workspace.launch(_round, (rows,))(
            x, norm_weight, inputs.scale, y,
            k, x.stride(0), eps, offset,
            NORM=norm_weight is not None, FINE=inputs.scale is not None, GROUP=inputs.group, BLOCK=block,
            LARGEST=FP4_MAX, SPAN=FP8_MAX, PDL=workspace.pdl, launch_pdl=workspace.pdl,
            num_warps=min(16, max(1, block // LANES)),
        )  # fmt: skip
    return y
