"""Inputs in an order of which a rank takes some: how they stand beside each other, and the transforms to that.

A rank's inputs are of arbitrary groups, of some of which it has more than of others. They are sorted by group, and each
group's are filled up to whole runs of `size` with columns that are worth zero. So each run is a group of the weight
that the rank holds, with the scale and the zero point that its inputs have in the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.quant.formats.layouts import BY_ROWS, Grid, Words
from engine.weights.checkpoint import Entry, Files, WeightsError
from engine.weights.rules import Shape
from kernels.sizes import cdiv
from kernels.weight.packed import packed

if TYPE_CHECKING:
    from kernels.select import Ops

# Inputs of a run at most: the smallest group that kernels for few rows take, which leaves the fewest columns empty.
RUN = 32
# Columns go up to whole blocks of kernels.
BLOCK = 128


class Spread(NamedTuple):
    """Of each column [C] its input (int64, any one where the column is empty) and whether it has one (bool); of each
    run [C / size] its group (int64)."""

    places: torch.Tensor
    filled: torch.Tensor
    groups: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """`columns` in runs of `size`, each of inputs of one group of `groups`; empty runs stand behind."""

    size: int
    groups: int
    columns: int

    def spread(self, groups: torch.Tensor) -> Spread:
        """Of each input's group [K], any integers below `groups`. Nothing asks a GPU for a number."""
        held, inputs = torch.sort(groups.long(), stable=True)
        counts = held.new_zeros(self.groups).scatter_add_(0, held, torch.ones_like(held))
        runs = (counts + self.size - 1) // self.size
        ends = runs.cumsum(0)
        among = torch.arange(len(held), device=held.device) - (counts.cumsum(0) - counts)[held]
        at = (ends - runs)[held] * self.size + among
        places = held.new_zeros(self.columns).scatter_(0, at, inputs)
        filled = torch.zeros(self.columns, dtype=torch.bool, device=held.device).scatter_(0, at, True)
        each = torch.arange(self.columns // self.size, device=held.device)
        return Spread(places, filled, torch.searchsorted(ends, each, right=True).clamp(max=self.groups - 1))


def slots(entries: Sequence[Entry], group: int, count: int) -> Slots:
    """What holds the inputs of each of some matrices that stand in one table, of `count` groups of `group` inputs, by
    tensors that say which group each input is of. These are read, for only they say how much is needed.

    Raises WeightsError for a group that is not there.
    """
    size, most = min(group, RUN), 0
    with Files() as files:
        for entry in entries:
            groups = files.tensor(entry).long()
            if bool(((groups < 0) | (groups >= count)).any()):
                raise WeightsError(f"{entry.name} names groups of inputs that are not among its {count}")
            most = max(most, int(((torch.bincount(groups) + size - 1) // size).sum()))
    return Slots(size, count, cdiv(most * size, BLOCK) * BLOCK)


@dataclass(frozen=True, slots=True)
class SharedWords:
    """Numbers in their columns, [N, words] int32, of numbers, groups of inputs and, with `zeros`, zero points. Those of
    empty columns are the zero points of their groups."""

    words: Words
    slots: Slots
    zeros: Grid | None = None

    def bound(self, ops: Ops) -> SharedWords:
        """As a transform may have it."""
        return replace(self, words=self.words.bound(ops))

    @property
    def cut(self) -> str | None:
        """As a transform may have it: an order moves numbers along a row, and zero points are packed across rows."""
        return "rows" if self.words.layout in BY_ROWS and self.zeros is None else None

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        n, inputs, bits = view[0], self.words.inputs, self.words.bits
        numbers = self.words.fits(shapes[:2], (n, cdiv(inputs * bits, 32)))
        return numbers and (self.zeros is None or self.zeros.fits(shapes[2:], (n, self.slots.groups)))

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        data, groups, *zeros = tensors
        layout, bits, rows = self.words.layout, self.words.bits, view[0]
        spread, most = self.slots.spread(groups), (1 << bits) - 1
        if self.zeros is None:
            zero = torch.full((1, 1), 1 << (bits - 1), dtype=torch.uint8, device=data.device)
        else:
            # What does not fit is told by the weight's check.
            zero = self.zeros(zeros, (rows, self.slots.groups)).clamp(max=most).to(torch.uint8)[:, spread.groups]
        whole = (zero | zero << 4 if bits == 4 else zero).repeat_interleave(4, dim=1).view(torch.int32)
        if self.zeros is not None:
            whole = whole.repeat_interleave(self.slots.size * bits // 32, dim=1)
        kept = packed(spread.filled.to(torch.uint8) * most, bits).view(torch.int32)
        made = self.words.repack(data, layout, bits, rows, spread.places)
        return made.bitwise_and_(kept).bitwise_or_(whole & ~kept)


@dataclass(frozen=True, slots=True)
class SharedGrid:
    """One value a row and run, [N, runs], of what `grid` makes of its tensor and of groups of inputs."""

    grid: Grid
    slots: Slots

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return self.grid.fits(shapes[:1], (view[0], self.slots.groups))

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        values, groups = tensors
        made = self.grid([values], (view[0], self.slots.groups))
        return made[:, self.slots.spread(groups).groups]


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """The input of each column, [1, C] int32, of each input's group [K]."""

    slots: Slots
    inputs: int

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return shapes[0] == (self.inputs,)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        return self.slots.spread(tensors[0]).places.int().reshape(view)
