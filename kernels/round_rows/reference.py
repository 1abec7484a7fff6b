"""Rows of a 16-bit weight rounded to fewer bits, to nearest, with the scales of what they become."""

from __future__ import annotations

from typing import Literal

import torch

from kernels.weight.inputs import RANGES
from kernels.weight.packed import packed

Kind = Literal["fp8", "int8", "int4"]
# Inputs that share a scale of 4-bit integers.
GROUP = 32
# Half of what the 15 steps of 4-bit integers span.
INT4_SPAN = 7.5
# A row, or a group, of zeros has a scale too.
SMALLEST_SCALE = 1e-10


def round_rows(rows: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [N, K] of any float dtype → numbers and scales, ties to even.

    "fp8" and "int8": [N, K] float8_e4m3fn or int8 and [N, 1] float32, the largest magnitude of a row over the number's
    span. "int4": unsigned integers about 8, [N, ceil(K / 8)] int32 with input i of a word in its bits from 4 · i on,
    zeros behind the last, and [N, ceil(K / 32)] bfloat16, the largest magnitude of 32 inputs over 7.5.
    """
    if kind == "int4":
        return _groups(rows)
    ends = RANGES[kind]
    # Magnitudes are exact in any float, and there are fewer bytes of the source's.
    largest = rows.abs().amax(dim=1, keepdim=True).float()
    scale = _quotient(largest, ends.span).clamp_(min=SMALLEST_SCALE)
    ratio = rows.float().div_(scale) if rows.dtype != torch.float32 else rows / scale
    if kind == "int8":
        return ratio.round_().clamp_(ends.low, ends.high).to(torch.int8), scale
    return ratio.clamp_(ends.low, ends.high).to(torch.float8_e4m3fn), scale


def _groups(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = rows.shape[1]
    parts = torch.nn.functional.pad(rows.float(), (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))
    # Rounded before numbers are found, so that these are the nearest.
    scale = _quotient(parts.abs().amax(dim=2), INT4_SPAN).clamp_(min=SMALLEST_SCALE).bfloat16()
    numbers = (parts / scale.float()[..., None]).round_().clamp_(-8, 7).to(torch.int8).add_(8)
    return packed(numbers.view(torch.uint8).flatten(1)[:, :inputs], 4).view(torch.int32), scale


def _quotient(numbers: torch.Tensor, by: float) -> torch.Tensor:
    # CUDA multiplies by the reciprocal of a number that is no tensor of its own, whose bits are others.
    return numbers / numbers.new_full((), by)
