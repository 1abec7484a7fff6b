"""Integers with a scale for each group of a row's inputs: compressed-tensors' pack-quantized and int-quantized, w4afp8,
GPTQ, AWQ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.quant.format import Declared, Format
from engine.quant.formats.layouts import BY_ROWS, NAMES, Grid, InPlace, Places, Row, Unpacked, Words, check_sizes
from engine.quant.formats.matrices import check_scales, no_scale, unlike
from engine.quant.formats.shares import SharedGrid, SharedPlaces, SharedWords, Slots, slots
from engine.quant.scheme import PackedScheme
from engine.weights.checkpoint import Entry, WeightsError, listed
from engine.weights.rules import Concat, Rule, Shape, Transform
from engine.weights.transforms import RowScales
from kernels.sizes import cdiv
from kernels.weight import PackedInt as Value
from kernels.weight.inputs import AS_THEY_ARE, RANGES, Inputs

DATA, SPLITS = ("weight_packed", "qweight"), False
INPUT_SCALE = "input_scale"
SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Runs:
    """Source i fills target[i % runs, i // runs], a row, where each entry of a table has so many sources."""

    runs: int

    def __call__(self, target: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        return [target[i % self.runs, i // self.runs][None] for i in range(len(shapes))]


@dataclass(frozen=True, slots=True)
class Stored:
    """Which tensors stand beside a module's numbers."""

    zeros: bool
    groups: bool
    sizes: bool


@dataclass(frozen=True, slots=True)
class PackedInt(Format):
    """scale: the dtype of scales. shapes: the weight's shape in each source; none where there is no checkpoint.
    exact_inputs: products take their inputs as they are, whatever the scheme says. slots: where inputs stand that are a
    rank's share of those in an order."""

    scheme: PackedScheme
    stored: Stored
    inputs: int
    scale: torch.dtype
    sources: int
    shapes: tuple[Shape, ...] = ()
    exact_inputs: bool = False
    slots: Slots | None = None

    @property
    def _ordered(self) -> bool:
        return self.scheme.ordered and self.stored.groups

    @property
    def _group(self) -> int:
        """Inputs of a group that is held."""
        return self.scheme.group or self.inputs if self.slots is None else self.slots.size

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        *table, n, k = shape
        k = k if self.slots is None else self.slots.columns
        bits = self.scheme.bits
        grid = (*table, n, cdiv(k, self._group))
        made: Declared = {"data": ((*table, n, cdiv(k * bits, 32)), torch.int32), "scale": (grid, self.scale)}
        if self.stored.zeros:
            # 8 bits and one more hold 256, which 8 bits less one may stand for.
            made["zero"] = (grid, torch.uint8 if bits == 4 else torch.int16)
        if self._ordered:
            entries = table[0] if table else 1
            made["order"] = ((self.sources // entries, entries, k), torch.int32)
        elif self.stored.groups:
            made["in_place"] = ((self.sources, 1), torch.int32)
        if self.stored.sizes:
            made["sizes"] = ((self.sources, 2), torch.int32)
        if self.scheme.activations == "static":
            made["input_scale"] = ((self.sources,), torch.float32)
        return made

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        scheme, names = self.scheme, NAMES[self.scheme.layout]
        each = Concat((1,) * self.sources)

        def filled(parameter: str, end: str, transform: Transform | None = None, *beside: str) -> Rule:
            named = tuple(zip(*(_named(rule.sources, other) for other in beside), strict=True))
            return Rule(f"{rule.target}.{parameter}", _named(rule.sources, end), rule.combine, transform, named)

        made = self._numbers(filled)
        if self._ordered:
            assert names.order is not None
            entries = shape[0] if len(shape) == 3 else 1
            runs = Runs(self.sources // entries)
            places = Places(scheme.group) if self.slots is None else SharedPlaces(self.slots, self.inputs)
            made.append(replace(filled("order", names.order, places), combine=runs))
        elif self.stored.groups:
            assert names.order is not None
            in_place = InPlace(self.inputs, scheme.group)
            made.append(replace(filled("in_place", names.order, in_place), combine=each))
        if self.stored.sizes:
            assert names.sizes is not None
            made.append(replace(filled("sizes", names.sizes, Row()), combine=each))
        if scheme.activations == "static":
            inputs = _named(rule.sources, INPUT_SCALE)
            made.append(Rule(f"{rule.target}.input_scale", inputs, each, RowScales()))
        return made

    def _numbers(self, filled: Callable[..., Rule]) -> list[Rule]:
        """What fills numbers, scales and zero points. filled(parameter, end of names, transform, ends of names of what
        stands beside) makes a rule."""
        scheme, names, slots = self.scheme, NAMES[self.scheme.layout], self.slots
        order = (names.order,) if self._ordered else ()
        zeros = (names.zero,) if self.stored.zeros else ()
        words = Words(scheme.layout, scheme.bits, self.inputs, self._ordered)
        grid, zero = Grid(scheme.layout), Grid(scheme.layout, scheme.bits, scheme.shift)
        if slots is not None:
            shared = SharedWords(words, slots, zero if zeros else None)
            made = [
                filled("data", names.data, shared, *order, *zeros),
                filled("scale", names.scale, SharedGrid(grid, slots), *order),
            ]
            return made + [filled("zero", end, SharedGrid(zero, slots), *order) for end in zeros]
        plain = scheme.layout == "pack-quantized" and not self._ordered
        by_rows = scheme.layout in BY_ROWS
        made = [
            filled("data", names.data, None if plain else words, *order),
            filled("scale", names.scale, None if by_rows else grid),
        ]
        return made + [filled("zero", end, zero) for end in zeros]

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        data, scale, order = parameters["data"], parameters["scale"], parameters.get("order")
        if order is not None:
            # Those of all runs are equal (`check`).
            order = order[0] if data.dim() == 3 else order[0, 0]
        about = (self.scheme.bits, self._group, self.inputs, self._rounding(parameters))
        return Value(data.view(torch.uint8), scale, parameters.get("zero"), order, *about)

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        bits = self.scheme.bits
        parameters["data"].random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        # Of numbers that are spread evenly.
        parameters["scale"].fill_(std * 12**0.5 / (1 << bits))
        if "zero" in parameters:
            parameters["zero"].fill_(1 << (bits - 1))
        if "order" in parameters:
            order = parameters["order"]
            order.copy_(torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand_as(order))
        if "in_place" in parameters:
            parameters["in_place"].fill_(1)
        if "sizes" in parameters:
            parameters["sizes"].zero_()
        if "input_scale" in parameters:
            parameters["input_scale"].fill_(8 / RANGES[self.scheme.number].span)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        order, in_place = parameters.get("order"), parameters.get("in_place")
        if in_place is not None and not bool(in_place.all()):
            raise WeightsError(
                "it gives its inputs an order (g_idx), and config.json does not say so (desc_act, actorder)"
            )
        if order is not None and bool((order < 0).any()):
            raise WeightsError(f"its inputs are not in groups of {self.scheme.group or self.inputs}")
        if order is not None and not bool((order == order[:1]).all()):
            raise WeightsError(
                "its parts form one product and give their inputs different orders (g_idx), which is not implemented: "
                "use a checkpoint without desc_act or actorder"
            )
        zero, most = parameters.get("zero"), (1 << self.scheme.bits) - 1
        if self.slots is not None and zero is not None and bool((zero > most).any()):
            raise WeightsError(
                f"its inputs have an order (g_idx), ranks share them, and it has a zero point above {most}, for which "
                "no number of its bits stands: set parallel.tensor to 1"
            )
        if "sizes" in parameters:
            for sizes, wanted in zip(parameters["sizes"].cpu(), self.shapes, strict=True):
                check_sizes(sizes, wanted)
        check_scales(parameters, self.exact_inputs)

    def _rounding(self, parameters: Mapping[str, torch.Tensor]) -> Inputs:
        scheme = self.scheme
        if self.exact_inputs or scheme.activations == "as they are":
            return AS_THEY_ARE
        # Projections that were fused, and experts, share what calibration found largest.
        given = parameters["input_scale"].amax() if scheme.activations == "static" else None
        return Inputs(scheme.number, scale=given)


def lacking(scheme: PackedScheme, module: str, entries: Mapping[str, Entry]) -> str | None:
    names = NAMES[scheme.layout]
    kinds: dict[str, tuple[torch.dtype, ...]] = {names.data: (names.kind,), names.scale: SCALES}
    if scheme.zeros:
        kinds[names.zero] = (torch.int32,)
    others = (INPUT_SCALE,) if scheme.activations == "static" else ()
    return unlike(scheme.layout, module, entries, kinds, others) or no_scale(module, others, entries)


def alike(scheme: PackedScheme, module: str, entries: Mapping[str, Entry]) -> Hashable:
    return _stored(scheme, [module], entries)


def make(
    scheme: PackedScheme,
    modules: Sequence[str],
    rule: Rule,
    shape: Shape,
    entries: Mapping[str, Entry] | None,
    exact_inputs: bool,
) -> PackedInt:
    """Raises WeightsError when the modules' tensors are of different kinds."""
    inputs = shape[-1]
    if entries is None:
        stored = Stored(scheme.zeros, scheme.ordered, False)
        return PackedInt(scheme, stored, inputs, torch.bfloat16, len(modules), exact_inputs=exact_inputs)
    names = NAMES[scheme.layout]
    scales = [entries[f"{module}.{names.scale}"] for module in modules]
    kinds = {scale.dtype for scale in scales}
    # Sources have as many rows as scales, which are checked with everything else.
    rows = [scale.shape[0 if scheme.layout in BY_ROWS else 1] for scale in scales]
    return PackedInt(
        scheme,
        _stored(scheme, modules, entries),
        inputs,
        kinds.pop() if len(kinds) == 1 else torch.float32,
        len(modules),
        tuple((n, inputs) for n in rows),
        exact_inputs,
        _slots(scheme, modules, entries),
    )


def dequantized(scheme: PackedScheme, modules: Sequence[str], rule: Rule, entries: Mapping[str, Entry]) -> Rule:
    """What fills a weight whose reader takes dense numbers alone."""
    names, stored = NAMES[scheme.layout], _stored(scheme, modules, entries)
    inputs = _inputs(scheme, entries[f"{modules[0]}.{names.data}"])
    words, slots = Words(scheme.layout, scheme.bits, inputs, scheme.ordered), _slots(scheme, modules, entries)
    count = cdiv(inputs, scheme.group or inputs) if slots is None else slots.groups
    ends = [names.scale]
    for end, there in ((names.zero, stored.zeros), (names.order, stored.groups), (names.sizes, stored.sizes)):
        ends += [end] if there and end is not None else []
    # A scale of inputs says nothing of the numbers: it is read, for it is part of the model, and not used.
    ends += [INPUT_SCALE] if scheme.activations == "static" else []
    return replace(
        rule,
        target=f"{rule.target}.data",
        sources=_named(rule.sources, names.data),
        transform=Unpacked(words, scheme.group, count, scheme.shift, stored.zeros, stored.groups, stored.sizes),
        beside=tuple(tuple(f"{module}.{end}" for end in ends) for module in modules),
    )


def _stored(scheme: PackedScheme, modules: Sequence[str], entries: Mapping[str, Entry]) -> Stored:
    names = NAMES[scheme.layout]

    def there(end: str | None, module: str) -> bool:
        return end is not None and f"{module}.{end}" in entries

    kinds = {
        Stored(scheme.zeros, scheme.ordered or there(names.order, module), there(names.sizes, module))
        for module in modules
    }
    if len(kinds) != 1:
        raise WeightsError(f"the tensors of {listed(list(modules))} are of different kinds, and they form one product")
    return kinds.pop()


def _slots(scheme: PackedScheme, modules: Sequence[str], entries: Mapping[str, Entry]) -> Slots | None:
    """Where inputs stand that are a rank's share of those in an order; None for others."""
    names = NAMES[scheme.layout]
    orders = [entries.get(f"{module}.{names.order}") for module in modules]
    held = [entry for entry in orders if entry is not None and entry.of_share]
    if not held:
        return None
    scale = entries[f"{modules[0]}.{names.scale}"]
    return slots(held, scheme.group, scale.shape[1 if scheme.layout in BY_ROWS else 0])


def _inputs(scheme: PackedScheme, data: Entry) -> int:
    """Inputs of a matrix, of which the last word along them is full."""
    first, second = data.shape
    each = 32 // scheme.bits
    return {
        "awq": first,
        "gptq": first * each,
        "pack-quantized": second * each,
        "int-quantized": second,
        "w4afp8": second * 2,
    }[scheme.layout]


def _named(sources: Sequence[str], end: str) -> tuple[str, ...]:
    return tuple(f"{source.removesuffix('.weight')}.{end}" for source in sources)
