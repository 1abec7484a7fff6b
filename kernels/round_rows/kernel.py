# mypy: disable-error-code="no-untyped-def"
"""Rounds rows of a weight, one program a row: magnitudes, scales and numbers in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.round_rows.reference import GROUP, INT4_SPAN, SMALLEST_SCALE, Kind
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight.inputs import RANGES, Range
from kernels.workspace import Workspace

_LANES = 512
# Integers about 8 in four bits.
_INT4 = Range(INT4_SPAN, -8.0, 7.0)


@triton.jit(do_not_specialize=["K", "W", "groups", "stride"])
def _round(
    p_rows, p_numbers, p_scales,
    K, W, groups, stride,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    SMALLEST: tl.constexpr, WHOLE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Row `program_id(0)`. GROUP inputs share a scale, and BLOCK covers them all. EACH numbers stand in a word."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    f = tl.load(p_rows + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    parts = tl.reshape(f, (BLOCK // GROUP, GROUP))
    g = tl.arange(0, BLOCK // GROUP)
    span = tl.full((BLOCK // GROUP,), SPAN, tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(parts), axis=1), span), SMALLEST).to(p_scales.dtype.element_ty)
    tl.store(p_scales + row * groups + g, scale, mask=g < groups)
    ratio = tl.div_rn(parts, tl.broadcast_to(scale.to(tl.float32)[:, None], parts.shape))
    if WHOLE:
        # Of what is below 2^22, this sum keeps whole numbers, to nearest and ties to even.
        ratio = (ratio + 12582912.0) - 12582912.0
    ratio = tl.minimum(tl.maximum(ratio, LOW), HIGH)
    if EACH == 1:
        numbers = tl.reshape(ratio, (BLOCK,)).to(p_numbers.dtype.element_ty)
        tl.store(p_numbers + row * W + k, numbers, mask=k < W)
    else:
        words = tl.reshape(ratio, (BLOCK // EACH, EACH)).to(tl.int32) + 8
        i = tl.arange(0, EACH)
        w = tl.arange(0, BLOCK // EACH)
        inside = w[:, None] * EACH + i[None, :] < K
        # No two of them share a bit.
        word = tl.sum(tl.where(inside, words << (i * (32 // EACH))[None, :], 0), axis=1)
        tl.store(p_numbers + row * W + w, word, mask=w < W)


def round_rows(workspace: Workspace, rows: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. It keeps nothing between launches, which may run in any stream."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    n, k = rows.shape
    if kind == "int4":
        ends, group, each, numbers_of, scales_of = _INT4, GROUP, 8, torch.int32, torch.bfloat16
    else:
        ends, group, each, scales_of = RANGES[kind], next_power_of_2(max(k, 16)), 1, torch.float32
        numbers_of = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    width, groups = cdiv(k, each), cdiv(k, group)
    numbers = torch.empty(n, width, dtype=numbers_of, device=rows.device)
    scales = torch.empty(n, groups, dtype=scales_of, device=rows.device)
    block = max(group, next_power_of_2(k))
    launch = workspace.launch(_round, (n,))
    launch(
        rows, numbers, scales, k, width, groups, rows.stride(0),
        GROUP=group, BLOCK=block, SPAN=ends.span, LOW=ends.low, HIGH=ends.high, SMALLEST=SMALLEST_SCALE,
        WHOLE=kind != "fp8", EACH=each, num_warps=min(16, max(1, block // _LANES)),
    )  # fmt: skip
    return numbers, scales
