"""Blocks of GGUF files, held as they are stored. Parts of one product may be in different formats."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from engine.quant.format import Declared, Format
from engine.quant.scheme import GgufScheme
from engine.weights.checkpoint import Entry, WeightsError, listed
from engine.weights.rules import Concat, Rule, Shape, Stack, StackConcat, Whole
from kernels.weight import GgufBlocks as Value
from kernels.weight.gguf import FORMATS, PLAIN, dequantize, row_bytes

DATA: tuple[str, ...] = ()
SPLITS = False


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a weight, or of each matrix of a table, in one format; sources: places of a rule's that fill them, plain
    ones hold numbers as they are."""

    format: str
    rows: int
    sources: tuple[int, ...]
    plain: bool


@dataclass(frozen=True, slots=True)
class Blocks(Format):
    runs: tuple[Run, ...]

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        *table, _, k = shape
        return {
            f"part{i}": ((*table, run.rows, row_bytes(k, run.format)), torch.uint8) for i, run in enumerate(self.runs)
        }

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        made = []
        for i, run in enumerate(self.runs):
            combine = rule.combine
            if len(self.runs) > 1:
                if isinstance(combine, Concat):
                    rows = tuple(combine.rows[place] for place in run.sources)
                    combine = Concat(rows) if len(rows) > 1 else Whole()
                else:
                    combine = Stack()
            sources = tuple(rule.sources[place] for place in run.sources)
            made.append(Rule(f"{rule.target}.part{i}", sources, combine, as_bytes=run.plain))
        return made

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        parts = tuple(parameters[f"part{i}"] for i in range(len(self.runs)))
        first = FORMATS[self.runs[0].format]
        inputs = parts[0].shape[-1] // first.num_bytes * first.num_values
        return Value(parts, tuple(run.format for run in self.runs), inputs)

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        raise NotImplementedError("blocks are found in a GGUF file alone, and are never drawn")


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The dense numbers of one source."""

    format: str

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        form = FORMATS[self.format]
        return prod(shapes[0]) // form.num_bytes * form.num_values == prod(view)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        return dequantize(tensors[0], self.format).reshape(view)


@dataclass(frozen=True, slots=True)
class LatentUp:
    """The up-projection of latents to each head's key and value, of which files hold keys [H, R, nope] and values
    [H, Dv, R]: formats of both, None for numbers as they are."""

    keys: str | None
    values: str | None

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        (h, rank, nope), (heads, value, k) = (
            (*shape[:2], _numbers(shape[2], name)) for shape, name in zip(shapes, (self.keys, self.values), strict=True)
        )
        return h == heads and rank == k and (h * (nope + value), rank) == view

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        keys, values = (
            tensor.float() if name is None else dequantize(tensor, name)
            for tensor, name in zip(tensors, (self.keys, self.values), strict=True)
        )
        return torch.cat((keys.transpose(1, 2), values), dim=1).reshape(view)


def _numbers(width: int, name: str | None) -> int:
    """Of a row of `width` bytes in a format; None: of as many numbers."""
    return width if name is None else width // FORMATS[name].num_bytes * FORMATS[name].num_values


def joined(rule: Rule, entries: Mapping[str, Entry]) -> Rule:
    """The rule of an up-projection of latents, from the two tensors that newer files hold in its place."""
    module = rule.sources[0].removesuffix(".kv_b_proj.weight")
    keys, values = (entries.get(f"{module}.{part}_b_proj.weight") for part in "kv")
    if len(rule.sources) > 1 or rule.sources[0] in entries or keys is None or values is None:
        return rule
    if len(keys.shape) != 3 or len(values.shape) != 3:
        raise WeightsError(f"misshapen: {keys.name} and {values.name} must hold a matrix for each head")
    return replace(rule, sources=(keys.name,), beside=((values.name,),), transform=LatentUp(keys.blocks, values.blocks))


def lacking(scheme: GgufScheme, module: str, entries: Mapping[str, Entry]) -> str | None:
    return None


def alike(scheme: GgufScheme, module: str, entries: Mapping[str, Entry]) -> Hashable:
    return None


def make(
    scheme: GgufScheme,
    modules: Sequence[str],
    rule: Rule,
    shape: Shape,
    entries: Mapping[str, Entry] | None,
    exact_inputs: bool,
) -> Blocks:
    """Raises WeightsError where experts of one table are in different formats."""
    assert entries is not None, "a config.json never says that weights are blocks"
    stored = [entries[source] for source in rule.sources]
    formats = [entry.blocks or PLAIN.get(entry.dtype, "") for entry in stored]
    if "" in formats:
        odd = [entry.name for entry, name in zip(stored, formats, strict=True) if not name]
        raise WeightsError(f"{listed(odd)} cannot form one product with blocks of a GGUF file")
    matrices = shape[0] if len(shape) == 3 else 1
    each = len(stored) // matrices
    if formats != formats[:each] * matrices:
        raise WeightsError(f"experts of one layer are in different formats, from {stored[0].name} on")
    plains = [entry.blocks is None for entry in stored]
    if len(set(zip(formats, plains, strict=True))) == 1:
        return Blocks((Run(formats[0], shape[-2], tuple(range(len(stored))), plains[0]),))
    if isinstance(rule.combine, Concat):
        rows = list(rule.combine.rows)
    elif isinstance(rule.combine, StackConcat):
        rows = [shape[-2] // each] * each
    else:
        raise WeightsError(f"{stored[0].name} and what stands beside it are in different formats: not implemented")
    runs: list[Run] = []
    for place in range(each):
        sources = tuple(range(place, len(stored), each))
        last = runs[-1] if runs else None
        if matrices == 1 and last is not None and (last.format, last.plain) == (formats[place], plains[place]):
            runs[-1] = replace(last, rows=last.rows + rows[place], sources=last.sources + sources)
        else:
            runs.append(Run(formats[place], rows[place], sources, plains[place]))
    return Blocks(tuple(runs))


def dequantized(scheme: GgufScheme, modules: Sequence[str], rule: Rule, entries: Mapping[str, Entry]) -> Rule:
    """What fills a weight whose reader takes dense numbers alone."""
    if rule.transform is not None:
        return replace(rule, target=f"{rule.target}.data")
    names = {entries[source].blocks for source in rule.sources}
    name = names.pop()
    if names or name is None:
        raise WeightsError(f"{listed(list(modules))} are read as dense numbers and are in different formats")
    return replace(rule, target=f"{rule.target}.data", transform=Dequantized(name))
