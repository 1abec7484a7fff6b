"""16-bit weights that are rounded to fewer bits while they are loaded, to nearest, one matrix at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from engine.quant.format import Declared, Format
from engine.quant.formats.fp8 import Fp8
from engine.quant.formats.int8 import Int8
from engine.quant.formats.packed import PackedInt, Stored
from engine.quant.scheme import Fp8Scheme, Int8Scheme, PackedScheme
from engine.weights.rules import Rule, Shape, Transform, bound
from kernels.round_rows import reference
from kernels.round_rows.reference import GROUP, Kind
from kernels.weight import Weight as Value

if TYPE_CHECKING:
    from kernels.select import Ops

# Kinds whose table one source's columns may be shared out in: a scale is that of a whole row.
SPLITS: dict[Kind, bool] = {"fp8": True, "int8": True, "int4": False}


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
    side by side in the source, whose rows have one scale. round_rows: the op of that name."""

    kind: Kind
    inputs: int
    round_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]] = reference.round_rows
    cut: ClassVar[str] = "rows"

    def bound(self, ops: Ops) -> Rounds:
        """As a transform may have it."""
        return replace(self, round_rows=ops.round_rows)

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        wanted = (view[0], self.inputs * (view[1] if len(view) == 3 else 1))
        return shapes[0] == wanted and (self.kind != "int4" or len(view) == 2)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scale = self.round_rows(tensors[0], self.kind)
        if self.kind == "int4":
            return numbers, scale
        return numbers.reshape(view), scale.reshape(-1, *(1,) * (len(view) - 1)).expand(*view[:-1], 1)


@dataclass(frozen=True, slots=True)
class RoundsMade:
    """As `Rounds`, of the matrix [N, K] that another transform makes of a source."""

    first: Transform
    rounds: Rounds

    def bound(self, ops: Ops) -> RoundsMade:
        """As a transform may have it."""
        return RoundsMade(bound(self.first, ops), self.rounds.bound(ops))

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        whole = (view[0], self.rounds.inputs)
        return self.first.fits(shapes, whole) and self.rounds.fits([whole], view)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.first(tensors, (view[0], self.rounds.inputs))
        assert isinstance(made, torch.Tensor)
        return self.rounds([made], view)


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
