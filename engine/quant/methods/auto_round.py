"""quant_method "auto-round" (arXiv:2309.05516): numbers packed as GPTQ's or AWQ's are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.reader import ConfigError, Reader, shown
from engine.quant import patterns
from engine.quant.methods.calibration import SILENT
from engine.quant.methods.groups import group_size
from engine.quant.scheme import Layout, PackedScheme

# packing_format, and its earlier spelling → whose packing it is, and what zero points are stored less.
FORMATS: dict[str, tuple[Layout, int]] = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptq": ("gptq", 1),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:awq": ("awq", 0),
}
# Of a module that is stored as it is.
PLAIN = 16
HEAD = "lm_head"
# Of inputs, which stay as they are.
INPUTS = ("act_data_type", "act_dynamic", "act_group_size", "act_sym")
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class AutoRound:
    """Every projection of a layer, with `head` the head too, is stored as `stored`, unless `named` has its name or one
    of `rules` begins it."""

    stored: PackedScheme
    named: Mapping[str, PackedScheme | None]
    rules: tuple[tuple[str, PackedScheme | None], ...] = ()
    steps: int = 1
    head: bool = False

    def scheme(self, module: str) -> PackedScheme | None:
        if module in self.named:
            return self.named[module]
        for pattern, stored in self.rules:
            if patterns.begins(pattern, module):
                return stored
        return self.stored if ".layers." in module or (self.head and module == HEAD) else None


def read(reader: Reader) -> AutoRound:
    """Raises ConfigError for a value that is not implemented."""
    layout = _layout(reader)
    head = reader.read(bool, "quant_lm_head", False)
    reader.skip(*SILENT, *INPUTS)
    whole = {key: reader.read(object, key) for key in ("bits", "group_size", "data_type", "act_bits") if key in reader}
    whole["sym"] = reader.read(bool, "sym", True)
    stored = _scheme(Reader(whole, reader.where), layout)
    reader.check(stored is not None, f"bits = {whole.get('bits')} is not implemented; implemented: 4, 8")
    assert stored is not None
    made: dict[str, PackedScheme | None] = {}
    for name, values in (reader.optional(dict, "extra_config") or {}).items():
        made[name] = _own(f"{reader.where}: extra_config: {name}", values, whole, layout)
    expressions = [name for name in made if not _NAME.fullmatch(name)]
    steps = patterns.check(f"{reader.where}: extra_config", expressions)
    named = {name: scheme for name, scheme in made.items() if _NAME.fullmatch(name)}
    return AutoRound(stored, named, tuple((name, made[name]) for name in expressions), 1 + steps, head)


def _layout(reader: Reader) -> tuple[Layout, int]:
    """Earlier versions name a kernel behind the packing, as backend: "auto_round:gptq:exllamav2"."""
    if "packing_format" in reader or "backend" not in reader:
        return FORMATS[reader.require("packing_format", *FORMATS)]
    backend = reader.read(str, "backend")
    packing = ":".join(backend.split(":")[:2])
    reader.check(
        packing in FORMATS, f"backend = {shown(backend)} is not implemented; implemented: {', '.join(FORMATS)}"
    )
    return FORMATS[packing]


def _own(where: str, values: Any, whole: Mapping[str, Any], layout: tuple[Layout, int]) -> PackedScheme | None:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object")
    reader = Reader({**whole, **values}, where)
    made = _scheme(reader, layout)
    if made is not None:
        reader.skip(*SILENT)
        reader.finish()
    return made


def _scheme(reader: Reader, layout: tuple[Layout, int]) -> PackedScheme | None:
    """Zero points are stored whether or not the numbers are symmetric, and are read either way."""
    if reader.read(int, "bits") >= PLAIN:
        return None
    bits, (name, shift) = reader.require("bits", 4, *((8,) if layout[0] == "gptq" else ())), layout
    reader.require("data_type", "int", default="int")
    reader.require("act_bits", PLAIN, 32, default=PLAIN)
    reader.skip(*INPUTS)
    reader.read(bool, "sym")
    return PackedScheme(name, bits, group_size(reader, "group_size"), zeros=True, shift=shift)
