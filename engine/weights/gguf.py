"""The tensors of a GGUF file under the names that a checkpoint in Hugging Face layout has for them, as the layout of an
architecture says. What is stored otherwise there is undone when it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from engine.gguf_file import GgufFile, Tensor
from engine.weights.checkpoint import Entry, WeightsError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Frequencies that follow from the config, which was made of them.
DERIVED = ("rope_freqs.weight",)
_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Layout:
    """An architecture's tensors.

    outer and layer: what those of the model and of a layer are called, and a checkpoint's names for them. experts:
    those that hold a matrix for each expert. bare: those whose name has no ending in a checkpoint. paired: heads of
    each projection whose rows stand in pairs, as an interleaved rotary embedding takes them. norm_offset: what is
    added to the weights of norms. prefix: what a checkpoint's names of layers begin with.
    """

    outer: Mapping[str, str]
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    bare: Mapping[str, str] = field(default_factory=dict)
    paired: Mapping[str, int] = field(default_factory=dict)
    norm_offset: float = 0.0
    prefix: str = "model.layers"


def first_file(folder: Path) -> Path | None:
    """The GGUF file of a folder, or the first of the several that one model is stored in.

    Raises WeightsError where files of several models lie there.
    """
    found = sorted(folder.glob("*.gguf"))
    firsts = [file for file in found if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(firsts) > 1:
        raise WeightsError(f"{folder} holds several GGUF models, {firsts[0].name} and {firsts[1].name}: keep one")
    return firsts[0] if firsts else None


def entries(held: GgufFile, layout: Layout) -> dict[str, Entry]:
    """Tensors by their names in a checkpoint; those that the layout does not have keep the file's.

    Raises WeightsError for two tensors of one name, and for rows that are not in pairs.
    """
    made: dict[str, Entry] = {}
    for tensor in held.tensors.values():
        if tensor.name in DERIVED:
            continue
        for entry in _named(tensor, layout):
            if made.setdefault(entry.name, entry) is not entry:
                raise WeightsError(f"two tensors of the GGUF file are {entry.name}")
    return made


def _named(tensor: Tensor, layout: Layout) -> Iterator[Entry]:
    entry = _entry(tensor)
    outer, _, end = tensor.name.rpartition(".")
    found = _NAME.fullmatch(tensor.name)
    if outer in layout.outer:
        name, part = f"{layout.outer[outer]}.{end}", outer
    elif found is None:
        yield entry
        return
    else:
        layer, part, end = found.groups()
        if part in layout.experts and len(entry.shape) == 3:
            for number in range(entry.shape[0]):
                one = entry.rows(number, number + 1)
                name = f"{layout.prefix}.{layer}.mlp.experts.{number}.{layout.experts[part]}.{end}"
                yield replace(one, name=name, shape=entry.shape[1:])
            return
        if part in layout.bare:
            yield replace(entry, name=f"{layout.prefix}.{layer}.{layout.bare[part]}")
            return
        if part not in layout.layer:
            yield entry
            return
        name = f"{layout.prefix}.{layer}.{layout.layer[part]}.{end}"
    heads = layout.paired.get(part)
    if heads is not None:
        rows = entry.shape[0]
        if heads < 1 or rows % (2 * heads):
            raise WeightsError(f"{tensor.name} has {rows} rows, which {heads} heads cannot share out in pairs")
        entry = replace(entry, paired=rows // heads)
    if part.endswith("norm"):
        entry = replace(entry, offset=layout.norm_offset)
    yield replace(entry, name=name)


def _entry(tensor: Tensor) -> Entry:
    dtype = DTYPES.get(tensor.format.name)
    if dtype is not None:
        return Entry(tensor.name, tensor.file, tensor.start, dtype, tensor.shape)
    *rows, k = tensor.shape
    width = k // tensor.format.num_values * tensor.format.num_bytes
    return Entry(tensor.name, tensor.file, tensor.start, torch.uint8, (*rows, width), blocks=tensor.format.name)
