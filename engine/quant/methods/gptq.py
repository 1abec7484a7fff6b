"""quant_method "gptq" (arXiv:2210.17323), as AutoGPTQ, GPTQModel and optimum write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.reader import ConfigError, Reader
from engine.quant import patterns
from engine.quant.methods.calibration import SILENT
from engine.quant.methods.groups import group_size
from engine.quant.scheme import PackedScheme

# Zero points are stored less this.
SHIFTS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Gptq:
    """Every projection is stored as `stored` unless a rule says otherwise: a pattern that the module's name begins
    with, and how it is stored then; the first that fits holds."""

    stored: PackedScheme
    rules: tuple[tuple[str, PackedScheme | None], ...] = ()
    head: bool = False
    steps: int = 1

    def scheme(self, module: str) -> PackedScheme | None:
        for pattern, stored in self.rules:
            if patterns.begins(pattern, module):
                return stored
        return self.stored if self.head or ".layers." in module else None


def read(reader: Reader) -> Gptq:
    """Raises ConfigError for a value that is not implemented."""
    named = reader.require("format", *SHIFTS, default="gptq")
    layout = reader.require("checkpoint_format", *SHIFTS, default=named)
    reader.require("format", layout, default=layout)
    reader.require("method", "gptq", default="gptq")
    reader.require("data_type", "int", default="int")
    reader.require("pack_dtype", "int32", default="int32")
    reader.require("is_marlin_format", False, default=False)
    reader.skip(*SILENT)
    head = reader.read(bool, "lm_head", False)
    whole = {key: reader.read(object, key) for key in ("bits", "group_size") if key in reader}
    whole |= {key: reader.read(bool, key, default) for key, default in (("desc_act", False), ("sym", True))}
    scheme = _scheme(Reader(whole, reader.where), SHIFTS[layout])
    dynamic = reader.optional(dict, "dynamic") or {}
    steps = patterns.check(f"{reader.where}: dynamic", map(_pattern, dynamic))
    rules = tuple(_rule(f"{reader.where}: dynamic: {key}", key, value, whole, layout) for key, value in dynamic.items())
    return Gptq(scheme, rules, head, 1 + steps)


def _scheme(reader: Reader, shift: int) -> PackedScheme:
    """Zero points are stored whether or not the numbers are symmetric, and are read either way."""
    bits, group = reader.require("bits", 4, 8), group_size(reader, "group_size")
    reader.read(bool, "sym")
    return PackedScheme("gptq", bits, group, True, reader.read(bool, "desc_act") and group > 0, shift)


def _pattern(key: str) -> str:
    return key[2:] if key[:2] in ("-:", "+:") else key


def _rule(where: str, key: str, values: Any, whole: Mapping[str, Any], layout: str) -> tuple[str, PackedScheme | None]:
    """A key is a pattern, behind "-:" for modules that are stored as they are, or "+:", which may be left out."""
    pattern = _pattern(key)
    if key.startswith("-:"):
        return pattern, None
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object")
    reader = Reader({**whole, **values}, where)
    made = _scheme(reader, SHIFTS[layout])
    reader.skip(*SILENT)
    reader.finish()
    return pattern, made
