"""8-bit integers, one a byte, with a scale a row or one a source: compressed-tensors' int-quantized."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from engine.quant.format import Declared, Format
from engine.quant.formats.matrices import check_scales, no_scale
from engine.quant.scheme import Int8Scheme
from engine.weights.checkpoint import Entry
from engine.weights.rules import Concat, Rule, Shape
from engine.weights.transforms import Dequantized, RowScales
from kernels.weight import Int8 as Value
from kernels.weight.inputs import RANGES, Inputs

DATA, SPLITS = ("weight",), True
SCALE, INPUT_SCALE = "weight_scale", "input_scale"
SPAN = RANGES["int8"].span


@dataclass(frozen=True, slots=True)
class Int8(Format):
    """sources: how many there are. exact_inputs: products take their inputs as they are, whatever the scheme says."""

    scheme: Int8Scheme
    sources: int
    exact_inputs: bool = False

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        made: Declared = {"data": (shape, torch.int8), "scale": ((*shape[:-1], 1), torch.float32)}
        if self.scheme.activations == "static":
            made["input_scale"] = ((self.sources,), torch.float32)
        return made

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        scale = Rule(f"{rule.target}.scale", _named(rule.sources, SCALE), rule.combine, RowScales())
        made = [replace(rule, target=f"{rule.target}.data"), scale]
        if self.scheme.activations == "static":
            each = Concat((1,) * self.sources)
            made.append(Rule(f"{rule.target}.input_scale", _named(rule.sources, INPUT_SCALE), each, RowScales()))
        return made

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        inputs = Inputs("int8")
        if self.exact_inputs or self.scheme.activations == "as they are":
            inputs = Inputs()
        elif self.scheme.activations == "static":
            # Projections that were fused read the same inputs, whose largest magnitude calibration found in each.
            inputs = Inputs("int8", scale=parameters["input_scale"].amax())
        return Value(parameters["data"], parameters["scale"], inputs)

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        parameters["data"].random_(-128, 128, generator=generator)
        # Of numbers that are spread evenly.
        parameters["scale"].fill_(std * 12**0.5 / 256)
        if "input_scale" in parameters:
            parameters["input_scale"].fill_(8 / SPAN)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        check_scales(parameters, self.exact_inputs)


def lacking(scheme: Int8Scheme, module: str, entries: Mapping[str, Entry]) -> str | None:
    weight, scale = entries[f"{module}.weight"], entries.get(f"{module}.{SCALE}")
    if weight.dtype != torch.int8 or scale is None:
        kind = str(weight.dtype).removeprefix("torch.")
        beside = "no weight_scale" if scale is None else "a weight_scale"
        return f"{weight.name} is stored as {kind} with {beside} beside it, which int-quantized does not store there"
    if len(weight.shape) != 2:
        return f"{weight.name} has the shape {list(weight.shape)}, which is no matrix"
    if prod(scale.shape) not in (1, weight.shape[0]):
        return f"{scale.name} has the shape {list(scale.shape)}, which is neither a scale a row nor one in all"
    return no_scale(module, (SCALE, INPUT_SCALE), entries)


def alike(scheme: Int8Scheme, module: str, entries: Mapping[str, Entry]) -> Hashable:
    return None


def make(
    scheme: Int8Scheme,
    modules: Sequence[str],
    rule: Rule,
    shape: Shape,
    entries: Mapping[str, Entry] | None,
    exact_inputs: bool,
) -> Int8:
    return Int8(scheme, len(modules), exact_inputs)


def dequantized(scheme: Int8Scheme, modules: Sequence[str], rule: Rule, entries: Mapping[str, Entry]) -> Rule:
    """What fills a weight whose reader takes dense numbers alone."""
    # A scale of inputs says nothing of the numbers: it is read, for it is part of the model, and not used.
    ends = (SCALE, INPUT_SCALE) if scheme.activations == "static" else (SCALE,)
    beside = tuple(tuple(f"{module}.{end}" for end in ends) for module in modules)
    return replace(rule, target=f"{rule.target}.data", transform=Dequantized(None), beside=beside)


def _named(sources: Sequence[str], end: str) -> tuple[str, ...]:
    return tuple(f"{source.removesuffix('.weight')}.{end}" for source in sources)
