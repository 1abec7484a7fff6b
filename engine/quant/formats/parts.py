"""A product whose projections are stored in different ways: each run of rows is held in a format of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from engine.quant.format import Declared, Format
from engine.weights.rules import Concat, Rule, Shape, Whole
from kernels.weight import Parts as Value


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a weight that are filled from so many of a rule's sources, consecutive ones."""

    held: Format
    sources: int
    rows: int


@dataclass(frozen=True, slots=True)
class Parts(Format):
    parts: tuple[Part, ...]

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        declared = [part.held.declare((part.rows, shape[-1]), dtype) for part in self.parts]
        return {_named(i, name): about for i, own in enumerate(declared) for name, about in own.items()}

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        made = []
        runs = runs_of(rule, [part.sources for part in self.parts])
        for i, (part, run) in enumerate(zip(self.parts, runs, strict=True)):
            for own in part.held.rules(run, (part.rows, shape[-1])):
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


def runs_of(rule: Rule, counts: list[int]) -> list[Rule]:
    """`rule` for each run of so many of its sources, which stand one after another in the weight."""
    assert isinstance(rule.combine, Concat)
    made = []
    for stop, count in zip(accumulate(counts), counts, strict=True):
        run = slice(stop - count, stop)
        combine = Concat(rule.combine.rows[run]) if count > 1 else Whole()
        # Ranks have cut the sources already.
        made.append(replace(rule, sources=rule.sources[run], combine=combine, beside=rule.beside[run], splits=()))
    return made


def _named(part: int, name: str) -> str:
    return f"part{part}_{name}"


def _renamed(part: int, weight: str, parameter: str | None) -> str | None:
    """The name of a part's parameter, by what it is called in a weight of its own."""
    return None if parameter is None else f"{weight}.{_named(part, parameter.removeprefix(f'{weight}.'))}"


def _own(part: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    start = _named(part, "")
    return {name.removeprefix(start): held for name, held in parameters.items() if name.startswith(start)}
