"""Where each parameter comes from: a table of rules, target ← sources. No torch: views are taken by duck typing.

A rule pulls. Its `combine` cuts the target into one view a source, in order, and each source is copied into its view;
nothing is concatenated on the way, and a source that does not fit its view is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
# One view a source, or a list of views that take consecutive rows of it. A view of one dimension more than its source
# takes each row in runs.
Combine = Callable[["Tensor", Sequence[Shape]], "Sequence[Tensor | list[Tensor]]"]
# Outputs and inputs that share a scale.
Block = tuple[int, int]


# What of a layer is shared out over ranks: heads (of queries, or of values with a state), groups of them (key-value
# heads, key heads, groups of a product behind attention), the inner channels of feed-forward parts, those of shared
# experts together, experts; and the vocabulary.
Part = Literal["heads", "groups", "inner", "shared", "experts", "vocabulary"]


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks share a source: its outputs (rows) or its inputs (columns), `width` of them for each of a part.

    expert: whose source it is; a rank has none of the experts that others hold.
    """

    axis: Literal["outputs", "inputs"]
    part: Part
    width: int = 1
    expert: int | None = None

    @property
    def sections(self) -> tuple[Split, ...]:
        """What stands one after another along the axis."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Sections:
    """How ranks share a source whose outputs are those of several projections, one after another."""

    sections: tuple[Split, ...]

    @property
    def axis(self) -> Literal["outputs", "inputs"]:
        return "outputs"

    @property
    def expert(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class Whole:
    """One source fills the target."""

    def __call__(self, target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [target] * len(shapes)

    def in_blocks(self, shape: Shape, block: Block) -> Whole:
        return self


@dataclass(frozen=True, slots=True)
class Concat:
    """Sources stand one after another along the first dimension, each of as many rows as the model says."""

    rows: tuple[int, ...]

    def __call__(self, target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return list(target.split(self.rows))

    def in_blocks(self, shape: Shape, block: Block) -> Concat | None:
        if any(rows % block[0] for rows in self.rows[:-1]):
            return None
        return Concat(tuple(-(-rows // block[0]) for rows in self.rows))


def concat(*rows: int) -> Concat:
    return Concat(rows)


@dataclass(frozen=True, slots=True)
class Stack:
    """Source i becomes target[i] (one matrix an expert)."""

    def __call__(self, target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return list(target.unbind(0))

    def in_blocks(self, shape: Shape, block: Block) -> Stack:
        return self


@dataclass(frozen=True, slots=True)
class StackConcat:
    """Sources come in runs, one run an entry of the target's first dimension; a run is concatenated (gate, up) in
    equal parts."""

    def __call__(self, target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        run = len(shapes) // target.shape[0]
        return [view for entry in target for view in entry.chunk(run)]

    def in_blocks(self, shape: Shape, block: Block) -> StackConcat | None:
        return self if shape[1] % (2 * block[0]) == 0 else None


@dataclass(frozen=True, slots=True)
class SharedBehindConcat:
    """As `StackConcat` with gate and up; the last two sources hold those of all shared experts, one after another,
    which stand behind the others."""

    def __call__(self, target: Tensor, shapes: Sequence[Shape]) -> list[Tensor | list[Tensor]]:
        count, inner = (len(shapes) - 2) // 2, target.shape[1] // 2
        shared = target[count:]
        ends: list[Tensor | list[Tensor]] = [[entry[:inner] for entry in shared], [entry[inner:] for entry in shared]]
        return [*StackConcat()(target[:count], shapes[:-2]), *ends]

    def in_blocks(self, shape: Shape, block: Block) -> SharedBehindConcat | None:
        return self if shape[1] % (2 * block[0]) == 0 else None


@dataclass(frozen=True, slots=True)
class SharedBehind:
    """As `Stack`; the last source holds the columns of all shared experts, which stand behind the others."""

    def __call__(self, target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        count = len(shapes) - 1
        return [*target[:count].unbind(0), target[count:].transpose(0, 1)]

    def in_blocks(self, shape: Shape, block: Block) -> SharedBehind | None:
        return self if shape[2] % block[1] == 0 else None


@dataclass(frozen=True, slots=True)
class Flat:
    """One matrix whose rows the target keeps in groups (one a head)."""

    def __call__(self, target: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [target.flatten(0, 1)]

    def in_blocks(self, shape: Shape, block: Block) -> Flat | None:
        return self if shape[1] % block[0] == 0 else None


class Transform(Protocol):
    """Makes what a view needs of a source's tensors: unpacked, repacked, spread or dequantized.

    One may have `cut`: "rows" where each row of its first tensor makes one of the view, "columns" where rows of the
    tensor make columns of the view, as many to one everywhere, and what is made of some does not depend on others.
    One may have `bound(ops)`, which gives the same transform by those ops (`kernels.select.Ops`): without it what
    kernels can make is made by their references.
    """

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        """Whether tensors of these shapes make a view of that one."""
        ...

    def __call__(self, tensors: Sequence[Tensor], view: Shape) -> Tensor | tuple[Tensor, ...]:
        """The view's numbers, in a dtype that it can take, on the tensors' device. Where the rule fills another
        parameter as well, (these, those of the other)."""
        ...


def bound(transform: Transform, ops: object) -> Transform:
    """The transform by the engine's own ops, where it takes any."""
    bind: Callable[[object], Transform] | None = getattr(transform, "bound", None)
    return transform if bind is None else bind(ops)


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameter `target` of the decoder is filled from tensors `sources` of the checkpoint.

    Names may hold `{layer}`, filled in by `at`. `combine` places the sources in the target. With a transform a view
    holds what it makes of the source and of the tensors that `beside` names: one tuple a source, or none at all.
    splits says how ranks share the sources, one a source or one for all; None, or none at all, leaves them whole.
    as_bytes: sources are taken as bytes, whatever dtypes they have. also: another parameter, whose views of the same
    sources the transform fills too.
    """

    target: str
    sources: tuple[str, ...]
    combine: Combine = Whole()
    transform: Transform | None = None
    beside: tuple[tuple[str, ...], ...] = ()
    splits: tuple[Split | Sections | None, ...] = ()
    as_bytes: bool = False
    also: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """Every parameter that it fills."""
        return (self.target,) if self.also is None else (self.target, self.also)

    def bound(self, ops: object) -> Rule:
        """The same with a transform by the engine's own ops."""
        return self if self.transform is None else replace(self, transform=bound(self.transform, ops))

    def at(self, layer: int) -> Rule:
        """The same rule for one layer."""
        number = str(layer)
        return replace(
            self,
            target=self.target.replace("{layer}", number),
            sources=tuple(source.replace("{layer}", number) for source in self.sources),
        )

    @property
    def shared(self) -> dict[str, Split | Sections]:
        """How ranks share each source, by its name."""
        if not self.splits:
            return {}
        each = self.splits * len(self.sources) if len(self.splits) == 1 else self.splits
        return {name: split for name, split in zip(self.sources, each, strict=True) if split is not None}

    def in_blocks(self, shape: Shape, block: Block) -> Combine | None:
        """What places blocks of the sources in the blocks of a target of `shape`; None where a block of the target
        would hold rows of two sources."""
        made = getattr(self.combine, "in_blocks", None)
        placed: Combine | None = None if made is None else made(shape, block)
        return placed
