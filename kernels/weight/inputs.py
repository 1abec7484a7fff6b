"""How a quantized product's inputs are quantized, and the definition of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FP8_MAX = 448.0


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


@dataclass(frozen=True, slots=True)
class Inputs:
    """number: what an input is rounded to; None leaves it as it is.

    group: inputs that share a scale, which is computed from them: their largest magnitude over the number's span;
    0 shares one among all inputs of a row. power_of_two rounds that scale up to a power of two (ue8m0). scale, a
    float32 scalar, is given by the checkpoint instead ("static") and holds for all rows.
    """

    number: Literal["fp8", "int8"] | None = None
    group: int = 0
    power_of_two: bool = False
    scale: torch.Tensor | None = None


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
        scale = parts.abs().amax(dim=-1).clamp(min=SMALLEST) / numbers_of.span
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
    numbers, scale = quantize(x, inputs)
    k = x.shape[-1]
    return numbers.float() * scale.repeat_interleave(inputs.group or max(k, 1), dim=-1)[:, :k]
