"""Which of an op's kernels runs, decided once a shape: the first of an ordered list of variants that accepts it.

`python -m kernels.explain` prints what is decided here, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

# Shapes that are remembered: steps without a graph have any number of rows.
MAX_SHAPES = 4096

P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Variant(Generic[P]):
    """One kernel of an op.

    declines: why it does not take a problem; None where it does. config: what it is launched with, for a problem that
    it takes. launch: called with the operands and the config. evidence: what was measured that put it here.
    """

    name: str
    declines: Callable[[P], str | None]
    config: Callable[[P], Any]
    launch: Callable[[Any, Any], Any]
    evidence: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What a problem is launched with."""

    name: str
    launch: Callable[[Any, Any], Any]
    config: Any


class Dispatch(Generic[P]):
    """The variants of an op, those first that win where they accept; the last one takes every problem."""

    def __init__(self, variants: Sequence[Variant[P]]) -> None:
        self.variants = tuple(variants)
        self._choices: dict[P, Choice] = {}

    def choose(self, problem: P) -> Choice:
        found = self._choices.get(problem)
        return self._decide(problem) if found is None else found

    def refusals(self, problem: P) -> list[tuple[Variant[P], str | None]]:
        """Each variant, in order, with why it declines the problem; None where it would take it."""
        return [(variant, variant.declines(problem)) for variant in self.variants]

    def decided(self) -> dict[P, Choice]:
        """The problems that are remembered, in the order in which they were decided."""
        return dict(self._choices)

    def forget(self) -> None:
        self._choices.clear()

    @contextmanager
    def changed(self, name: str, **fields: Any) -> Iterator[None]:
        """Within, the variant of that name has other fields: for measurements, and tests of what else would have run.

        Raises KeyError when there is no such variant.
        """
        if name not in {variant.name for variant in self.variants}:
            raise KeyError(name)
        held = self.variants, self._choices
        self.variants = tuple(replace(v, **fields) if v.name == name else v for v in self.variants)
        self._choices = {}
        try:
            yield
        finally:
            self.variants, self._choices = held

    def _decide(self, problem: P) -> Choice:
        variant = next(variant for variant in self.variants if variant.declines(problem) is None)
        if len(self._choices) >= MAX_SHAPES:
            self._choices.clear()
        made = self._choices[problem] = Choice(variant.name, variant.launch, variant.config(problem))
        return made
