"""How checkpoints store integers, most in words of 32 bits, and the transforms to what `kernels.weight.PackedInt`
holds.

| layout | numbers | scales | zero points |
|---|---|---|---|
| pack-quantized | [N, words], along inputs | [N, groups] | [words, groups], along outputs |
| int-quantized | [N, K], one a byte | [N, groups] | |
| w4afp8 | [N, K / 2], two a byte | [N, groups] | |
| gptq | [words, N], along inputs | [groups, N] | [groups, words], along outputs |
| awq | [K, words], along outputs | [groups, N] | [groups, words], along outputs |

A word's lowest bits come first; AWQ's eight numbers stand in an order of their own. Those of int-quantized and w4afp8
have a sign; the others' zero points are subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from engine.quant.scheme import Layout
from engine.weights.checkpoint import WeightsError
from engine.weights.rules import Shape
from kernels.repack import reference
from kernels.sizes import cdiv
from kernels.weight.packed import integers, packed

if TYPE_CHECKING:
    from kernels.select import Ops


@dataclass(frozen=True, slots=True)
class Names:
    """What a layout calls a module's numbers, scales, zero points, the groups of its inputs, and its sizes; kind: what
    numbers are stored as."""

    data: str
    scale: str
    zero: str
    order: str | None = None
    sizes: str | None = None
    kind: torch.dtype = torch.int32


# Layouts whose matrices and scales have a row for each output.
BY_ROWS = ("pack-quantized", "int-quantized", "w4afp8")
NAMES: dict[Layout, Names] = {
    "pack-quantized": Names("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    "int-quantized": Names("weight", "weight_scale", "weight_zero_point", kind=torch.int8),
    "w4afp8": Names("weight", "weight_scale_inv", "weight_zero_point", kind=torch.int8),
    "gptq": Names("qweight", "scales", "qzeros", "g_idx"),
    "awq": Names("qweight", "scales", "qzeros"),
}


@dataclass(frozen=True, slots=True)
class Words:
    """Numbers packed along their inputs, [N, words] int32. ordered: a second tensor says which group each input is of,
    and the inputs of a group are put beside each other. repack: the op of that name."""

    layout: Layout
    bits: int
    inputs: int
    ordered: bool = False
    repack: Callable[..., torch.Tensor] = reference.repack

    def bound(self, ops: Ops) -> Words:
        """As a transform may have it."""
        return replace(self, repack=ops.repack)

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        n, words = view
        data = {
            "pack-quantized": (n, words),
            "int-quantized": (n, self.inputs),
            "w4afp8": (n, self.inputs // 2),
            "gptq": (words, n),
            "awq": (self.inputs, cdiv(n * self.bits, 32)),
        }
        return shapes[0] == data[self.layout] and all(shape == (self.inputs,) for shape in shapes[1:])

    @property
    def cut(self) -> str | None:
        """As a transform may have it: an order moves numbers along a row."""
        if self.layout in BY_ROWS:
            return "rows"
        return None if self.ordered else "columns"

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        data, *groups = tensors
        places = torch.sort(groups[0].long(), stable=True).indices if self.ordered else None
        if self.layout == "int-quantized":
            return _signed(data, self.bits)
        if self.layout == "w4afp8":
            # A sign less 8 is the highest bit turned.
            return (data.contiguous().view(torch.uint8) ^ 0x88).view(torch.int32)
        if self.layout == "pack-quantized" and places is None:
            return data
        return self.repack(data, self.layout, self.bits, view[0], places)


@dataclass(frozen=True, slots=True)
class Grid:
    """One value a row and group, [N, groups]: scales (`bits` None) or zero points, to which `shift` is added."""

    layout: Layout
    bits: int | None = None
    shift: int = 0

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        n, groups = view
        if self.bits is None:
            return shapes[0] == ((n, groups) if self.layout in BY_ROWS else (groups, n))
        words = cdiv(n * self.bits, 32)
        return shapes[0] == ((words, groups) if self.layout == "pack-quantized" else (groups, words))

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        if self.bits is None:
            return tensors[0] if self.layout in BY_ROWS else tensors[0].t()
        words = tensors[0].t().contiguous() if self.layout == "pack-quantized" else tensors[0]
        zero = unpacked(words, self.bits, awq=self.layout == "awq")[:, : view[0]].t()
        return zero.to(torch.int16) + self.shift if self.shift else zero


@dataclass(frozen=True, slots=True)
class Places:
    """The inputs of group after group, [1, K] int32, of each input's group [K]; −1 unless each group but the last has
    `group` inputs. 0: one group has all of them. What is wrong is not raised here, for asking a GPU holds loading
    up."""

    group: int

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return shapes[0] == view[-1:]

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        groups, places = torch.sort(tensors[0].long(), stable=True)
        return torch.where(_stand_in_groups(groups, self.group), places, -1).reshape(view)


@dataclass(frozen=True, slots=True)
class InPlace:
    """Whether inputs stand group after group, [1, 1] int32, of each one's group [K]: all of them where a rank takes
    `inputs` of them."""

    inputs: int
    group: int

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return len(shapes[0]) == 1 and shapes[0][0] >= self.inputs

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        return _stand_in_groups(tensors[0], self.group).int().reshape(view)


@dataclass(frozen=True, slots=True)
class Row:
    """A vector as a row."""

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return shapes[0] == view[-1:]

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        return tensors[0].reshape(view)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The dense numbers of one source. Tensors: numbers, scales, then zero points, groups of inputs and sizes, each
    where it is said to be there. group 0 is one of all inputs. count: groups of a row, of which inputs in an order may
    be of any."""

    words: Words
    group: int
    count: int
    shift: int
    zeros: bool
    groups: bool
    sizes: bool

    def bound(self, ops: Ops) -> Unpacked:
        """As a transform may have it."""
        return replace(self, words=self.words.bound(ops))

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        layout, bits, inputs = self.words.layout, self.words.bits, self.words.inputs
        n, groups = self._outputs(view), self.count
        rest = list(shapes[2:])
        wanted = [Grid(layout).fits(shapes[1:2], (n, groups))]
        if self.zeros:
            wanted.append(Grid(layout, bits).fits([rest.pop(0)], (n, groups)))
        own = [rest.pop(0)] if self.groups else []
        return all(wanted) and self.words.fits([shapes[0], *own], (n, cdiv(inputs * bits, 32)))

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        layout, bits, inputs = self.words.layout, self.words.bits, self.words.inputs
        n, size = self._outputs(view), self.group or inputs
        data, scale, *rest = tensors
        grid = (n, self.count)
        zero = (
            Grid(layout, bits, self.shift)([rest.pop(0)], grid)
            if self.zeros
            else torch.tensor(1 << (bits - 1), device=data.device)
        )
        group = rest.pop(0).long() if self.groups else torch.arange(inputs, device=data.device) // size
        plain = replace(self.words, ordered=False)
        words = plain([data], (n, cdiv(inputs * bits, 32)))
        if self.sizes:
            check_sizes(rest.pop(0), (n, inputs))
        numbers = unpacked(words, bits)[:, :inputs].float()
        spread = zero.float()[:, group] if self.zeros else zero.float()
        return ((numbers - spread) * Grid(layout)([scale], grid).float()[:, group]).reshape(view)

    def _outputs(self, view: Shape) -> int:
        count = 1
        for size in view:
            count *= size
        return count // self.words.inputs


def unpacked(words: torch.Tensor, bits: int, awq: bool = False) -> torch.Tensor:
    """words [R, W] int32 → their numbers [R, W · 32 / bits] uint8."""
    numbers = integers(words.contiguous().view(torch.uint8), bits)
    return numbers.unflatten(-1, (-1, *reference.AWQ_PLACES)).transpose(-1, -2).flatten(-3) if awq else numbers


def _signed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers with a sign, one a byte [N, K] int8 → words [N, words] int32. Raises WeightsError for what is larger."""
    half = 1 << (bits - 1)
    if not bool(((numbers >= -half) & (numbers < half)).all()):
        raise WeightsError(f"it holds numbers that are not of {bits} bits")
    return packed((numbers + half).view(torch.uint8), bits).view(torch.int32)


def _stand_in_groups(groups: torch.Tensor, size: int) -> torch.Tensor:
    """Whether inputs stand in groups of `size` (0: in one), the last of which may be smaller: a bool."""
    return (groups == torch.arange(len(groups), device=groups.device) // (size or max(len(groups), 1))).all()


def check_sizes(sizes: torch.Tensor, wanted: Shape) -> None:
    if tuple(sizes.tolist()) != wanted:
        raise WeightsError(f"it says that it has the shape {sizes.tolist()}, and it has {list(wanted)}")
