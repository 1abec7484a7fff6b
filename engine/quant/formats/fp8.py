"""8-bit floats with scales by blocks, by rows, one a source, or exponents of groups of inputs (MXFP8)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.quant.format import Declared, Format
from engine.quant.formats.matrices import EXPONENTS, check_scales, no_scale
from engine.quant.formats.matrices import SCALES as NUMBERS
from engine.quant.scheme import MX_GROUP, Activations, Fp8Scheme
from engine.weights.checkpoint import Entry, WeightsError
from engine.weights.rules import Block, Concat, Rule, Shape
from engine.weights.transforms import BlockRows, Dequantized, Exponents, RowScales
from kernels.sizes import cdiv
from kernels.weight import Fp8 as Value
from kernels.weight.inputs import FP8_MAX, Inputs

DATA, SPLITS = ("weight",), True
# What a checkpoint calls a module's scales, and its scale of inputs, the second by transformers.
SCALES = ("weight_scale_inv", "weight_scale", "scale")
INPUT_SCALES = ("input_scale", "activation_scale")
# Inputs that share a scale.
GROUPS: dict[Activations, int] = {"dynamic by 128": 128, "dynamic by 32": MX_GROUP}


@dataclass(frozen=True, slots=True)
class Fp8(Format):
    """scales: the end of the names of scales. published: the block that sources have a scale for, None for one a row or
    one in all. block: the block that the parameter has a scale for; None is a row. sources: how many there are.
    exact_inputs: products take their inputs as they are, whatever the scheme says. input_scales: as scales, of
    inputs."""

    scheme: Fp8Scheme
    scales: str
    published: Block | None
    block: Block | None
    sources: int
    exact_inputs: bool = False
    input_scales: str = INPUT_SCALES[0]

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        *table, n, k = shape
        rows, columns = self.block or (1, k)
        made: Declared = {
            "data": (shape, torch.float8_e4m3fn),
            "scale": ((*table, cdiv(n, rows), cdiv(k, columns)), torch.float32),
        }
        if self.scheme.activations == "static":
            made["input_scale"] = ((self.sources,), torch.float32)
        return made

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        scale = Rule(f"{rule.target}.scale", _named(rule.sources, self.scales), rule.combine)
        if self.published is None:
            scale = replace(scale, transform=RowScales())
        elif self.block == self.published:
            transform = Exponents() if self.scheme.exponents else None
            combine = rule.in_blocks(shape, self.published) or rule.combine
            scale = replace(scale, combine=combine, transform=transform)
        else:
            scale = replace(scale, transform=BlockRows(self.published[0]))
        made = [replace(rule, target=f"{rule.target}.data"), scale]
        if self.scheme.activations == "static":
            inputs = _named(rule.sources, self.input_scales)
            made.append(Rule(f"{rule.target}.input_scale", inputs, Concat((1,) * self.sources), RowScales()))
        return made

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        data = parameters["data"]
        return Value(data, parameters["scale"], self.block or (1, data.shape[-1]), self._inputs(parameters))

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        data = parameters["data"]
        for part in data.flatten(0, -2).split(1 << 14):
            drawn = torch.empty(part.shape, device=part.device).normal_(0.0, FP8_MAX / 8, generator=generator)
            part.copy_(drawn.clamp(-FP8_MAX, FP8_MAX))
        parameters["scale"].fill_(8 * std / FP8_MAX)
        if "input_scale" in parameters:
            parameters["input_scale"].fill_(8 / FP8_MAX)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        check_scales(parameters, self.exact_inputs)

    def _inputs(self, parameters: Mapping[str, torch.Tensor]) -> Inputs:
        kind = self.scheme.activations
        if self.exact_inputs or kind == "as they are":
            return Inputs()
        if kind == "static":
            # Projections that were fused read the same inputs, whose largest magnitude calibration found in each.
            return Inputs("fp8", scale=parameters["input_scale"].amax())
        return Inputs("fp8", GROUPS.get(kind, 0), self.scheme.power_of_two, largest=self.scheme.largest)


def stored(module: str, entries: Mapping[str, Entry]) -> str | None:
    """The end of the name of a module's scales, where its weight is stored so."""
    weight = entries.get(f"{module}.weight")
    if weight is None or weight.dtype != torch.float8_e4m3fn:
        return None
    return next((name for name in SCALES if f"{module}.{name}" in entries), None)


def lacking(scheme: Fp8Scheme, module: str, entries: Mapping[str, Entry]) -> str | None:
    weight = entries.get(f"{module}.weight")
    if stored(module, entries) is not None:
        assert weight is not None
        if len(weight.shape) != 2:
            return f"{weight.name} has the shape {list(weight.shape)}, which is no matrix"
        kinds = EXPONENTS if scheme.exponents else (*NUMBERS, torch.float8_e8m0fnu)
        return no_scale(module, SCALES, entries, kinds) or no_scale(module, INPUT_SCALES, entries)
    kind = "no tensor" if weight is None else str(weight.dtype).removeprefix("torch.")
    return f"{module}.weight is stored as {kind}, and no scales of 8-bit floats stand beside it"


def alike(scheme: Fp8Scheme, module: str, entries: Mapping[str, Entry]) -> Hashable:
    return stored(module, entries), _published(module, scheme, entries), _input_scales(module, entries)


def make(
    scheme: Fp8Scheme,
    modules: Sequence[str],
    rule: Rule,
    shape: Shape,
    entries: Mapping[str, Entry] | None,
    exact_inputs: bool,
) -> Fp8:
    """The format of the weight that `rule` fills. entries None: a checkpoint that is not there, for random weights.

    Raises WeightsError when the modules' scales are of different kinds.
    """
    if entries is None:
        published = scheme.block
        scales, inputs = "weight_scale_inv", INPUT_SCALES[0]
    else:
        kinds = {
            (stored(module, entries), _published(module, scheme, entries), _input_scales(module, entries))
            for module in modules
        }
        if len(kinds) != 1:
            raise WeightsError(f"the scales of {', '.join(modules)} are of different kinds, and they form one product")
        ((found, published, inputs),) = kinds
        assert found is not None
        scales = found
    block = published
    if published is not None and rule.in_blocks(shape, published) is None:
        block = (1, published[1])
    return Fp8(scheme, scales, published, block, len(modules), exact_inputs, inputs)


def dequantized(scheme: Fp8Scheme, modules: Sequence[str], rule: Rule, entries: Mapping[str, Entry]) -> Rule:
    """What fills a weight whose reader takes dense numbers alone."""
    ends = [stored(module, entries) for module in modules]
    # A scale of inputs says nothing of the numbers: it is read, for it is part of the model, and not used.
    static = scheme.activations == "static"
    beside = tuple(
        (f"{module}.{own}", *([f"{module}.{_input_scales(module, entries)}"] if static else []))
        for module, own in zip(modules, ends, strict=True)
    )
    transform = Dequantized(_published(modules[0], scheme, entries))
    return replace(rule, target=f"{rule.target}.data", transform=transform, beside=beside)


def _input_scales(module: str, entries: Mapping[str, Entry]) -> str:
    """The end of the name of the module's scale of inputs; the usual one where there is none, which the loader says."""
    return next((name for name in INPUT_SCALES if f"{module}.{name}" in entries), INPUT_SCALES[0])


def _published(module: str, scheme: Fp8Scheme, entries: Mapping[str, Entry]) -> Block | None:
    name = stored(module, entries)
    weight, scale = entries[f"{module}.weight"].shape, entries[f"{module}.{name}"].shape
    rows, columns = scheme.block or (128, 128)
    if scheme.exponents and scale == (weight[0], cdiv(weight[1], columns)):
        return rows, columns
    if scale == (cdiv(weight[0], rows), cdiv(weight[1], columns)) and scale not in ((), (1,), (1, 1)):
        return rows, columns
    if scale == (1, 1) and scheme.block is not None:
        return rows, columns
    if scale in ((), (1,), (1, 1), (weight[0],), (weight[0], 1)) and not scheme.exponents:
        return None
    raise WeightsError(
        f"{module}.{name} has the shape {list(scale)}, which is neither a scale a row, one in all, nor one a block of "
        f"{rows} by {columns} of {list(weight)}"
    )


def _named(sources: Sequence[str], end: str) -> tuple[str, ...]:
    return tuple(f"{source.removesuffix('.weight')}.{end}" for source in sources)
