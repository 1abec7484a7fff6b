"""Where each parameter comes from: a table of rules, target ← sources. No torch: views are taken by duck typing.

A rule pulls. Its `combine` cuts the target into one view a source, in order, and each source is copied into its view;
nothing is concatenated on the way, and a source that does not fit its view is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
# One view a source, or a list of views that take consecutive rows of it. A view of one dimension more than its source
# takes each row in runs.
Combine = Callable[["Tensor", Sequence[Shape]], "Sequence[Tensor | list[Tensor]]"]


def whole(target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """One source fills the target."""
    return [target] * len(shapes)


def concat(*rows: int) -> Combine:
    """Sources stand one after another along the first dimension, each of as many rows as the model says."""

    def cut(target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return list(target.split(rows))

    return cut


def stack(target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Source i becomes target[i] (one matrix an expert)."""
    return list(target.unbind(0))


def stack_concat(target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Sources come in runs, one run an entry of the target's first dimension; a run is concatenated (gate, up) in
    equal parts."""
    run = len(shapes) // target.shape[0]
    return [view for entry in target for view in entry.chunk(run)]


def shared_behind_concat(target: Tensor, shapes: Sequence[Shape]) -> list[Tensor | list[Tensor]]:
    """As `stack_concat` with gate and up; the last two sources hold those of all shared experts, one after another,
    which stand behind the others."""
    count, inner = (len(shapes) - 2) // 2, target.shape[1] // 2
    shared = target[count:]
    ends: list[Tensor | list[Tensor]] = [[entry[:inner] for entry in shared], [entry[inner:] for entry in shared]]
    return [*stack_concat(target[:count], shapes[:-2]), *ends]


def shared_behind(target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """As `stack`; the last source holds the columns of all shared experts, which stand behind the others."""
    count = len(shapes) - 1
    return [*target[:count].unbind(0), target[count:].transpose(0, 1)]


def flat(target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """One matrix whose rows the target keeps in groups (one a head)."""
    return [target.flatten(0, 1)]


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameter `target` of the decoder is filled from tensors `sources` of the checkpoint.

    Names may hold `{layer}`, filled in by `at`. `combine` places the sources in the target.
    """

    target: str
    sources: tuple[str, ...]
    combine: Combine = whole

    def at(self, layer: int) -> Rule:
        """The same rule for one layer."""
        number = str(layer)
        return replace(
            self,
            target=self.target.replace("{layer}", number),
            sources=tuple(source.replace("{layer}", number) for source in self.sources),
        )
