"""A product whose projections are stored in different ways, or a table of experts whose gates and ups are: each run of
rows is held in a format of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.quant.format import Declared, Format
from engine.weights.rules import Combine, Concat, Rule, Shape, Stack, Whole
from kernels.weight import Parts as Value


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a weight, or of each matrix of a table; places: those of a rule's sources that fill them."""

    held: Format
    places: tuple[int, ...]
    rows: int

    def of(self, shape: Shape) -> Shape:
        """The part's shape, where the weight has that one."""
        return (*shape[:-2], self.rows, shape[-1])


@dataclass(frozen=True, slots=True)
class Parts(Format):
    parts: tuple[Part, ...]

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        declared = [part.held.declare(part.of(shape), dtype) for part in self.parts]
        return {_named(i, name): about for i, own in enumerate(declared) for name, about in own.items()}

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        made = []
        for i, part in enumerate(self.parts):
            for own in part.held.rules(rule_of(rule, part.places), part.of(shape)):
                target, also = (_renamed(i, rule.target, name) for name in (own.target, own.also))
                assert target is not None
                made.append(replace(own, target=target, also=also))
        return made

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        return Value(tuple(part.held.value(_own(i, parameters)) for i, part in enumerate(self.parts)))

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        for i, part in enumerate(self.parts):
            part.held.draw(_own(i, parameters), std, generator)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for i, part in enumerate(self.parts):
            part.held.check(_own(i, parameters))


def rule_of(rule: Rule, places: tuple[int, ...]) -> Rule:
    """`rule` for some of its sources: consecutive ones of a matrix, or one of each matrix of a table."""
    combine: Combine = Stack()
    if isinstance(rule.combine, Concat):
        combine = Concat(tuple(rule.combine.rows[place] for place in places)) if len(places) > 1 else Whole()
    sources = tuple(rule.sources[place] for place in places)
    beside = tuple(rule.beside[place] for place in places) if rule.beside else ()
    # Ranks have cut the sources already.
    return replace(rule, sources=sources, combine=combine, beside=beside, splits=())


def _named(part: int, name: str) -> str:
    return f"part{part}_{name}"


def _renamed(part: int, weight: str, parameter: str | None) -> str | None:
    """The name of a part's parameter, by what it is called in a weight of its own."""
    return None if parameter is None else f"{weight}.{_named(part, parameter.removeprefix(f'{weight}.'))}"


def _own(part: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    start = _named(part, "")
    return {name.removeprefix(start): held for name, held in parameters.items() if name.startswith(start)}
