"""4-bit floats with a scale for each group of a row's inputs: compressed-tensors' nvfp4 and mxfp4, modelopt's NVFP4,
and experts whose scales stand in `.scale`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from engine.quant.format import Declared, Format
from engine.quant.formats.matrices import EXPONENTS, no_scale, unlike
from engine.quant.scheme import Fp4Layout, Fp4Scheme
from engine.weights.checkpoint import Entry, WeightsError
from engine.weights.rules import Concat, Rule, Shape
from kernels.sizes import cdiv
from kernels.weight import Fp4 as Value
from kernels.weight.inputs import FP4_MAX, FP8_MAX, Inputs

DATA, SPLITS = ("weight_packed", "weight"), False
BYTES = (torch.uint8, torch.int8)


@dataclass(frozen=True, slots=True)
class Names:
    """What a layout calls numbers, scales and the factor of a tensor, and that of its inputs; divides: numbers are
    divided by these factors."""

    data: str
    scale: str
    factor: str | None = None
    inputs: str | None = None
    divides: bool = False

    @property
    def group(self) -> int:
        return 32 if self.factor is None else 16


NAMES: dict[Fp4Layout, Names] = {
    "mxfp4-pack-quantized": Names("weight_packed", "weight_scale"),
    "nvfp4-pack-quantized": Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True),
    "modelopt": Names("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "scale": Names("weight", "scale"),
}


@dataclass(frozen=True, slots=True)
class Factor:
    """A tensor's factor for each row of a view [N]. The last tensor is the factor; those before it have its rows."""

    divides: bool

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return shapes[0][0] == view[0] and prod(shapes[1]) == 1

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        factor = tensors[1].float().reshape(1)
        if self.divides and not bool(torch.isfinite(factor)):
            raise WeightsError("the scale of the whole tensor, which divides it, is no finite number")
        return (1 / factor if self.divides else factor).expand(view)


@dataclass(frozen=True, slots=True)
class InputFactor:
    """Of one source, the factor of its inputs [1]."""

    divides: bool

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return prod(shapes[0]) == 1

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        factor = tensors[0].float().reshape(view)
        return 1 / factor if self.divides else factor


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The dense numbers of one source. Tensors: numbers, scales, then the factor where the layout has one."""

    layout: Fp4Layout

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        (n, half), group = shapes[0], NAMES[self.layout].group
        return n * half * 2 == prod(view) and shapes[1] == (n, cdiv(2 * half, group))

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        names, data = NAMES[self.layout], tensors[0].view(torch.uint8)
        scale, factor = tensors[1], None
        if names.factor is not None:
            factor = Factor(names.divides)([data, tensors[2]], (len(data),))
        scale = scale.view(torch.uint8) if names.factor is None else scale
        return Value(data, scale, factor, names.group, 2 * data.shape[-1]).dense(torch.float32).reshape(view)


@dataclass(frozen=True, slots=True)
class Fp4(Format):
    """sources: how many there are. rounds: products round their inputs to 4 bits too. idle: by source, factors of
    inputs, which a product of 16-bit inputs does without."""

    scheme: Fp4Scheme
    inputs: int
    sources: int
    rounds: bool = False
    idle: tuple[tuple[str, ...], ...] = ()

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        *rows, k = shape
        names = NAMES[self.scheme.layout]
        kind = torch.uint8 if names.factor is None else torch.float8_e4m3fn
        made: Declared = {
            "data": ((*rows, k // 2), torch.uint8),
            "scale": ((*rows, k // names.group), kind),
        }
        if names.factor is not None:
            made["factor"] = (tuple(rows), torch.float32)
        if self.rounds and names.inputs is not None:
            made["input_factor"] = ((self.sources,), torch.float32)
        return made

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        names = NAMES[self.scheme.layout]

        def filled(parameter: str, end: str) -> Rule:
            return Rule(f"{rule.target}.{parameter}", _named(rule.sources, end), rule.combine)

        scale = filled("scale", names.scale)
        made = [
            replace(filled("data", names.data), as_bytes=True),
            # Exponents are no numbers to convert.
            replace(scale, as_bytes=names.factor is None),
        ]
        if names.factor is not None:
            ends = _named(rule.sources, names.factor)
            idle = self.idle or ((),) * len(ends)
            beside = tuple((end, *others) for end, others in zip(ends, idle, strict=True))
            made.append(replace(filled("factor", names.scale), transform=Factor(names.divides), beside=beside))
        if self.rounds and names.inputs is not None:
            apart = Concat((1,) * self.sources)
            factors = _named(rule.sources, names.inputs)
            made.append(Rule(f"{rule.target}.input_factor", factors, apart, InputFactor(names.divides)))
        return made

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        group, factor = NAMES[self.scheme.layout].group, parameters.get("input_factor")
        # Projections that were fused read the same inputs, whose largest magnitude calibration found in each.
        given = Inputs("fp4", group, scale=None if factor is None else factor.amax()) if self.rounds else Inputs()
        return Value(parameters["data"], parameters["scale"], parameters.get("factor"), group, self.inputs, given)

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        parameters["data"].random_(0, 256, generator=generator)
        # The root of the mean square of all sixteen numbers is 2.9.
        if "factor" in parameters:
            parameters["scale"].fill_(1.0)
            parameters["factor"].fill_(std / 2.9)
            if "input_factor" in parameters:
                parameters["input_factor"].fill_(8 / (FP4_MAX * FP8_MAX))
        else:
            exponent = torch.tensor(std / 2.9).log2().round()
            parameters["scale"].fill_(int(exponent) + 127)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        factor = parameters.get("factor")
        if factor is not None and not bool(torch.isfinite(factor).all()):
            raise WeightsError("the scale of a whole tensor is zero or no finite number")
        inputs = parameters.get("input_factor")
        if inputs is not None and not bool((torch.isfinite(inputs) & (inputs > 0)).all()):
            raise WeightsError("the scale of all inputs is no finite number above zero")


def lacking(scheme: Fp4Scheme, module: str, entries: Mapping[str, Entry]) -> str | None:
    names = NAMES[scheme.layout]
    scales = EXPONENTS if names.factor is None else (torch.float8_e4m3fn,)
    factors = () if names.factor is None else (names.factor,)
    kinds = {names.data: BYTES, names.scale: scales}
    given = () if names.inputs is None else (names.inputs,)
    return unlike(f"{scheme.layout} FP4", module, entries, kinds, factors) or no_scale(
        module, (*factors, *given), entries
    )


def alike(scheme: Fp4Scheme, module: str, entries: Mapping[str, Entry]) -> Hashable:
    return None


def make(
    scheme: Fp4Scheme,
    modules: Sequence[str],
    rule: Rule,
    shape: Shape,
    entries: Mapping[str, Entry] | None,
    exact_inputs: bool,
) -> Fp4:
    """Raises WeightsError for inputs that do not fill whole groups."""
    group, rounds = NAMES[scheme.layout].group, scheme.quantized_inputs and not exact_inputs
    if shape[-1] % group:
        raise WeightsError(f"{modules[0]} has {shape[-1]} inputs, which are not whole groups of {group}")
    idle = () if entries is None or rounds else tuple(_idle(module, entries) for module in modules)
    return Fp4(scheme, shape[-1], len(modules), rounds, idle)


def dequantized(scheme: Fp4Scheme, modules: Sequence[str], rule: Rule, entries: Mapping[str, Entry]) -> Rule:
    """What fills a weight whose reader takes dense numbers alone."""
    names = NAMES[scheme.layout]
    ends = (names.scale,) if names.factor is None else (names.scale, names.factor)
    beside = tuple((*(f"{module}.{end}" for end in ends), *_idle(module, entries)) for module in modules)
    return replace(
        rule,
        target=f"{rule.target}.data",
        sources=_named(rule.sources, names.data),
        transform=Dequantized(scheme.layout),
        beside=beside,
    )


def _idle(module: str, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    ends = (names.inputs for names in NAMES.values() if names.inputs is not None)
    return tuple(name for end in ends if (name := f"{module}.{end}") in entries)


def _named(sources: Sequence[str], end: str) -> tuple[str, ...]:
    return tuple(f"{source.removesuffix('.weight')}.{end}" for source in sources)
