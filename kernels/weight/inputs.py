"""How a quantized product's inputs are quantized, and the definition of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FP8_MAX = 448.0
# Inputs that share a scale where scales are powers of two (OCP Microscaling Formats 1.0).
MX_GROUP = 32


@dataclass(frozen=True, slots=True)
class Range:
    """Of a kind of number: what the largest magnitude among inputs is divided by for their scale, and its ends."""

    span: float
    low: float
    high: float


# Integers as compressed-tensors defines them: half of what 255 steps span, and one number more below zero than above.
RANGES = {"fp8": Range(FP8_MAX, -FP8_MAX, FP8_MAX), "int8": Range(127.5, -128.0, 127.0)}
# Below this, a group of inputs counts as zero: its scale stays a normal number.
SMALLEST = 1e-10
FP4_MAX = 6.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """number: what an input is rounded to; None leaves it as it is.

    group: inputs that share a scale, which is computed from them: their largest magnitude over the number's span;
    0 shares one among all inputs of a row. power_of_two rounds that scale up to a power of two (ue8m0). scale, a
    float32 scalar, is given by the checkpoint instead ("static") and holds for all rows. largest: a magnitude that
    counts as the largest where inputs are beyond it, which become it (fbgemm's `scale_ub`).

    Of 4-bit floats ("fp4") a group's scale is an 8-bit float times `scale` (NVFP4), or without one a power of two
    (MXFP4): `round_fp4`.
    """

    number: Literal["fp8", "int8", "fp4"] | None = None
    group: int = 0
    power_of_two: bool = False
    scale: torch.Tensor | None = None
    largest: float | None = None


AS_THEY_ARE = Inputs()


def quantize(x: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] → its numbers [T, K] (float8_e4m3fn or int8) and their scales [T, groups] float32, groups 1 where all
    inputs of a row share one. Rounds to nearest, ties to even; what is beyond the largest number becomes it."""
    wide, numbers_of = x.float(), RANGES[inputs.number or "fp8"]
    k = wide.shape[-1]
    group = inputs.group or max(k, 1)
    pad = -k % group
    parts = torch.nn.functional.pad(wide, (0, pad)).unflatten(-1, ((k + pad) // group, group))
    if inputs.scale is not None:
        scale = inputs.scale.reshape(1, 1).expand(len(x), parts.shape[1])
    else:
        largest = parts.abs().amax(dim=-1).clamp(SMALLEST, inputs.largest)
        # Of a number, torch multiplies by its reciprocal on a GPU.
        scale = largest / torch.full_like(largest, numbers_of.span)
        if inputs.power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
    ratio = parts / scale[..., None]
    # Integers are rounded first: what lies half a step below the lowest becomes the lowest either way.
    ratio = (ratio.round() if inputs.number == "int8" else ratio).clamp(numbers_of.low, numbers_of.high)
    numbers = ratio.to(torch.int8 if inputs.number == "int8" else torch.float8_e4m3fn)
    return numbers.view(torch.int8).flatten(-2)[:, :k].view(numbers.dtype), scale


def quantized(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """x [T, K] as the product sees it, float32."""
    if inputs.number is None:
        return x.float()
    if inputs.number == "fp4":
        return round_fp4(x, inputs).float()
    numbers, scale = quantize(x, inputs)
    k = x.shape[-1]
    return numbers.float() * scale.repeat_interleave(inputs.group or max(k, 1), dim=-1)[:, :k]


def round_fp4(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """x [T, K] → the multiples of 4-bit floats (e2m1) that its values become, in x's dtype, K whole groups.

    With `inputs.scale` a group's scale is its largest magnitude over 6, rounded to nearest to an 8-bit float (e4m3)
    times that. Without, it is a quarter of the power of two at or below that magnitude (OCP Microscaling Formats 1.0,
    section 6.3), or of the next from three quarters of the way on, as compressed-tensors has it. Numbers round to
    nearest, ties to an even code; a group whose scale is zero becomes zero.
    """
    parts = x.float().unflatten(-1, (-1, inputs.group))
    largest = parts.abs().amax(dim=-1, keepdim=True)
    if inputs.scale is not None:
        fine = (largest / FP4_MAX / inputs.scale).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
        scale = fine.float() * inputs.scale
    else:
        bits = largest.view(torch.int32) + (1 << 21)  # a quarter of the distance to the next power
        scale = (bits & 0x7F800000).view(torch.float32) / 4
    ratio = torch.where(scale == 0, 0.0, parts / scale).clamp(-FP4_MAX, FP4_MAX)
    size = ratio.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((ratio / step).round() * step * scale).flatten(-2).to(x.dtype)
