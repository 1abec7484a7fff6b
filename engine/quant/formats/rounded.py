"""16-bit weights that are rounded to fewer bits while they are loaded, to nearest, one matrix at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.quant.format import Declared, Format
from engine.quant.formats.fp8 import Fp8
from engine.quant.formats.int8 import Int8
from engine.quant.formats.packed import PackedInt, Stored
from engine.quant.scheme import Fp8Scheme, Int8Scheme, PackedScheme
from engine.weights.rules import Rule, Shape
from kernels.weight import Weight as Value
from kernels.weight.inputs import FP8_MAX, RANGES
from kernels.weight.packed import packed

Kind = Literal["fp8", "int8", "int4"]
# Inputs that share a scale of 4-bit integers.
GROUP = 32
# Kinds whose table one source's columns may be shared out in: a scale is that of a whole row.
SPLITS: dict[Kind, bool] = {"fp8": True, "int8": True, "int4": False}
# A row, or a group, of zeros has a scale too.
SMALLEST = 1e-10


@dataclass(frozen=True, slots=True)
class Rounded(Format):
    """Held as `held` says, and filled from dense sources."""

    kind: Kind
    held: Format

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        return self.held.declare(shape, dtype)

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        return [
            replace(rule, target=f"{rule.target}.{part}", transform=Rounds(self.kind, shape[-1], part == "scale"))
            for part in ("data", "scale")
        ]

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        return self.held.value(parameters)

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        self.held.draw(parameters, std, generator)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Numbers of a source [N, K], or their scales. A view [N, S, ..] is of S matrices of `inputs` inputs that stand
    side by side in the source, whose rows have one scale."""

    kind: Kind
    inputs: int
    scales: bool

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        wanted = (view[0], self.inputs * (view[1] if len(view) == 3 else 1))
        return shapes[0] == wanted and (self.kind != "int4" or len(view) == 2)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        wide = tensors[0].float()
        if self.kind == "int4":
            parts = torch.nn.functional.pad(wide, (0, -wide.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
            # Half of what the 15 steps span, rounded before numbers are found, so that these are the nearest.
            scale = (parts.abs().amax(dim=2) / 7.5).clamp(min=SMALLEST).bfloat16()
            if self.scales:
                return scale
            numbers = (parts / scale.float()[..., None]).round().clamp(-8, 7) + 8
            return packed(numbers.to(torch.uint8).flatten(1)[:, : self.inputs], 4).view(torch.int32)
        ends = RANGES[self.kind]
        scale = (wide.abs().amax(dim=1, keepdim=True) / ends.span).clamp(min=SMALLEST)
        if self.scales:
            return scale.reshape(-1, *(1,) * (len(view) - 1)).expand(view)
        ratio = wide / scale
        if self.kind == "int8":
            return ratio.round().clamp(ends.low, ends.high).to(torch.int8).reshape(view)
        return ratio.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).reshape(view)


def make(kind: Kind, sources: int, shape: Shape, exact_inputs: bool) -> Rounded:
    """Inputs of products are rounded by row as numbers are, those of 4-bit integers not at all."""
    held: Format
    if kind == "fp8":
        held = Fp8(Fp8Scheme("dynamic by token"), "", None, None, sources, exact_inputs)
    elif kind == "int8":
        held = Int8(Int8Scheme("dynamic by token"), sources, exact_inputs)
    else:
        scheme = PackedScheme("pack-quantized", 4, GROUP)
        held = PackedInt(scheme, Stored(False, False, False), shape[-1], torch.bfloat16, sources)
    return Rounded(kind, held)
