"""16-bit weights that are rounded to fewer bits while they are loaded, to nearest, one matrix at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from engine.quant.format import Declared, Format
from engine.quant.formats.fp8 import Fp8
from engine.quant.formats.int8 import Int8
from engine.quant.formats.packed import PackedInt, Stored
from engine.quant.scheme import Fp8Scheme, Int8Scheme, PackedScheme
from engine.weights.rules import Rule, Shape, Transform
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
        rounds = Rounds(self.kind, shape[-1])
        made = rounds if rule.transform is None else RoundsMade(rule.transform, rounds)
        return [replace(rule, target=f"{rule.target}.data", transform=made, also=f"{rule.target}.scale")]

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        return self.held.value(parameters)

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        self.held.draw(parameters, std, generator)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Numbers of a source [N, K] and their scales. A view [N, S, ..] is of S matrices of `inputs` inputs that stand
    side by side in the source, whose rows have one scale."""

    kind: Kind
    inputs: int
    cut: ClassVar[str] = "rows"

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        wanted = (view[0], self.inputs * (view[1] if len(view) == 3 else 1))
        return shapes[0] == wanted and (self.kind != "int4" or len(view) == 2)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "int4":
            return self._groups(tensors[0])
        ends = RANGES[self.kind]
        # Magnitudes are exact in any float, and there are fewer bytes of the source's.
        most = tensors[0].abs().amax(dim=1, keepdim=True).float()
        scale = _quotient(most, ends.span).clamp_(min=SMALLEST)
        ratio = tensors[0].float().div_(scale) if tensors[0].dtype != torch.float32 else tensors[0] / scale
        if self.kind == "int8":
            numbers = ratio.round_().clamp_(ends.low, ends.high).to(torch.int8)
        else:
            numbers = ratio.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return numbers.reshape(view), scale.reshape(-1, *(1,) * (len(view) - 1)).expand(*view[:-1], 1)

    def _groups(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.nn.functional.pad(source.float(), (0, -source.shape[1] % GROUP))
        parts = wide.unflatten(1, (-1, GROUP))
        # Half of what the 15 steps span, rounded before numbers are found, so that these are the nearest.
        scale = _quotient(parts.abs().amax(dim=2), 7.5).clamp_(min=SMALLEST).bfloat16()
        numbers = (parts / scale.float()[..., None]).round_().clamp_(-8, 7).to(torch.int8).add_(8)
        return packed(numbers.view(torch.uint8).flatten(1)[:, : self.inputs], 4).view(torch.int32), scale


@dataclass(frozen=True, slots=True)
class RoundsMade:
    """As `Rounds`, of the matrix [N, K] that another transform makes of a source."""

    first: Transform
    rounds: Rounds

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        whole = (view[0], self.rounds.inputs)
        return self.first.fits(shapes, whole) and self.rounds.fits([whole], view)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.first(tensors, (view[0], self.rounds.inputs))
        assert isinstance(made, torch.Tensor)
        return self.rounds([made], view)


def _quotient(numbers: torch.Tensor, by: float) -> torch.Tensor:
    # CUDA multiplies by the reciprocal of a number that is no tensor of its own, whose bits are others.
    return numbers / numbers.new_full((), by)


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
