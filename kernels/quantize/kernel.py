# mypy: disable-error-code="no-untyped-def"
"""Inputs of a quantized product, one program a row: norm or gated activation, scales and numbers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gated_activation.kernel import gated
from kernels.gated_activation.reference import is_silu
from kernels.linear.skinny import INTERPRETED
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight.inputs import RANGES, SMALLEST, Inputs
from kernels.workspace import Workspace

LANES = 512


@triton.jit
def input_row(x, p_norm, k, inside, K, eps, offset, NORM: tl.constexpr, PDL: tl.constexpr):
    """The row at x as the product sees it before it is rounded, float32: normed, and rounded to x's dtype."""
    if NORM:
        weight = tl.load(p_norm + k, mask=inside, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    h = tl.load(x + k, mask=inside, other=0.0)
    f = h.to(tl.float32)
    if NORM:
        f = f * tl.rsqrt(tl.sum(f * f, axis=0) / K + eps) * weight
        f = f.to(h.dtype).to(tl.float32)
    return f


@triton.jit
def gated_row(x, k, inside, K, limit, SILU: tl.constexpr, LIMITED: tl.constexpr, PDL: tl.constexpr):
    """The activation of a row at x of 2K numbers, gate and up, rounded to x's dtype: float32."""
    if PDL:
        gdc_wait()
    gate = tl.load(x + k, mask=inside, other=0.0)
    up = tl.load(x + K + k, mask=inside, other=0.0)
    return gated(gate, up, limit, SILU, LIMITED).to(gate.dtype).to(tl.float32)


# A step's scales of one group stand as far apart as it has rows.
@triton.jit(do_not_specialize=["scales_row", "scales_group"])
def _quantize(
    p_x, p_norm, p_scale, p_numbers, p_scales,
    K, groups, x_stride, scales_row, scales_group, eps, offset, limit,
    GATED: tl.constexpr, SILU: tl.constexpr, LIMITED: tl.constexpr, NORM: tl.constexpr, STATIC: tl.constexpr,
    POWER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SMALLEST: tl.constexpr, SPAN: tl.constexpr,
    LARGEST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Row `program_id(0)` of x; GATED: of gate and up. GROUP inputs share a scale, and BLOCK covers them all. EXACT: by
    divisions, for an interpreter that rounds products before sums."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    if GATED:
        f = gated_row(p_x + row * x_stride, k, inside, K, limit, SILU, LIMITED, PDL)
    else:
        f = input_row(p_x + row * x_stride, p_norm, k, inside, K, eps, offset, NORM, PDL)
    parts = tl.reshape(f, (BLOCK // GROUP, GROUP))
    g = tl.arange(0, BLOCK // GROUP)
    if STATIC:
        scale = tl.load(p_scale) + tl.zeros((BLOCK // GROUP,), tl.float32)
    else:
        largest = tl.maximum(tl.max(tl.abs(parts), axis=1), SMALLEST)
        if LARGEST is not None:
            largest = tl.minimum(largest, LARGEST)
        # Rounded: an integer's largest input lies between two numbers, and a power of two is one exactly.
        scale = tl.div_rn(largest, tl.full((BLOCK // GROUP,), SPAN, tl.float32))
        if POWER:
            bits = scale.to(tl.int32, bitcast=True)
            # the exponent alone, one more where there is a fraction
            scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    if EXACT:
        ratio = tl.div_rn(parts, tl.broadcast_to(scale[:, None], parts.shape))
    else:
        # Rounded as by a division: Markstein 1990, theorem 7.1, from a reciprocal that is.
        inverse = tl.div_rn(tl.full((BLOCK // GROUP,), 1.0, tl.float32), scale)[:, None]
        near = tl.minimum(tl.maximum(parts * inverse, 4 * LOW), 4 * HIGH)
        ratio = tl.fma(tl.fma(-near, tl.broadcast_to(scale[:, None], parts.shape), parts), inverse, near)
    if WHOLE:
        # Of what is below 2^22, this sum keeps whole numbers, to nearest and ties to even.
        ratio = (ratio + 12582912.0) - 12582912.0
    ratio = tl.minimum(tl.maximum(ratio, LOW), HIGH)
    numbers = tl.reshape(ratio, (BLOCK,)).to(p_numbers.dtype.element_ty)
    tl.store(p_numbers + row * K + k, numbers, mask=inside)
    tl.store(p_scales + row * scales_row + g.to(tl.int64) * scales_group, scale, mask=g < groups)


def quantize(
    workspace: Workspace,
    x: torch.Tensor,
    inputs: Inputs,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str | None = None,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. Rows of x may be strided."""
    numbers, scales = quantized(workspace, x, inputs, norm_weight, eps, offset, activation, limit)
    return numbers, scales.contiguous()


def quantized(
    workspace: Workspace,
    x: torch.Tensor,
    inputs: Inputs,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str | None = None,
    limit: float | None = None,
    rows_of: int = 1,
    by_row: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize`, with room for whole sequences of `rows_of` rows, whatever stands in those that x does
    not have. Scales of one group after another stand behind each other, [T, groups] with strides (1, T), or with
    by_row those of one row after another."""
    if activation is not None and norm_weight is not None:
        raise ValueError("quantize takes an activation or a norm, not both")
    rows, k = x.shape
    silu = activation is None or is_silu(activation)
    k = k if activation is None else k // 2
    held = cdiv(rows, rows_of) * rows_of
    group = inputs.group or next_power_of_2(max(k, 16))
    groups = cdiv(k, group) if inputs.group else 1
    whole, ends = inputs.number == "int8", RANGES[inputs.number or "fp8"]
    numbers = torch.empty(held, k, dtype=torch.int8 if whole else torch.float8_e4m3fn, device=x.device)
    sizes = (held, groups) if by_row else (groups, held)
    scales = torch.empty(sizes, dtype=torch.float32, device=x.device)
    scales = scales if by_row else scales.t()
    if rows:
        block = max(group, next_power_of_2(k))
        workspace.launch(_quantize, (rows,))(
            x, norm_weight, inputs.scale, numbers, scales,
            k, groups, x.stride(0), scales.stride(0), scales.stride(1), eps, offset, limit or 0.0,
            GATED=activation is not None, SILU=silu, LIMITED=limit is not None, NORM=norm_weight is not None,
            STATIC=inputs.scale is not None, POWER=inputs.power_of_two, GROUP=group, BLOCK=block, SMALLEST=SMALLEST,
            LARGEST=inputs.largest, SPAN=ends.span, LOW=ends.low, HIGH=ends.high, WHOLE=whole, EXACT=INTERPRETED,
            PDL=workspace.pdl,
            launch_pdl=workspace.pdl, num_warps=min(16, max(1, block // LANES)),
        )  # fmt: skip
    return numbers, scales
