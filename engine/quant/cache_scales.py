"""The scales that a checkpoint has for a cache of 8-bit floats."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.quant.cache import WAY_OUT
from engine.weights.checkpoint import Checkpoint, Entry, Files, WeightsError
from kernels.cache_scales import UNSCALED, CacheScales

# Names of scales behind a layer's attention: of keys, of values, of both.
SPELLINGS = {
    "k_proj.k_scale": "k",
    "v_proj.v_scale": "v",
    "k_scale": "k",
    "v_scale": "v",
    "k_proj.output_scale": "k",
    "v_proj.output_scale": "v",
    "kv_scale": "kv",
}


@dataclass(frozen=True, slots=True)
class FoundScales:
    """What a checkpoint holds for an 8-bit cache: scales by layer, and the names of the tensors that say so."""

    layers: Mapping[int, CacheScales]
    names: tuple[str, ...]

    def of(self, count: int) -> tuple[CacheScales, ...]:
        """Of `count` layers; 1 where the checkpoint has none."""
        return tuple(self.layers.get(layer, UNSCALED) for layer in range(count))


def found(checkpoint: Checkpoint | None, prefix: str, count: int, used: bool = True) -> FoundScales:
    """The scales of attention of `count` layers under `prefix`, in any of the spellings of `SPELLINGS`. Not `used`:
    their names alone.

    Raises WeightsError for scales that are not one number above 0 a layer, for two that contradict each other, and for
    one of keys without one of values.
    """
    layers: dict[int, dict[str, tuple[float, str]]] = {}
    names = []
    pattern = re.compile(rf"{re.escape(prefix)}\.layers\.(\d+)\.self_attn\.({'|'.join(map(re.escape, SPELLINGS))})")
    entries = {} if checkpoint is None else checkpoint.entries
    with Files() as files:
        for name in sorted(entries):
            match = pattern.fullmatch(name)
            if match is None or int(match[1]) >= count:
                continue
            names.append(name)
            if not used:
                continue
            value = _number(files, entries[name])
            held = layers.setdefault(int(match[1]), {})
            for kind in SPELLINGS[match[2]]:
                other = held.setdefault(kind, (value, name))
                if other[0] != value:
                    raise WeightsError(f"{name} and {other[1]} are scales of the same cache and differ: keep one")
    made = {}
    for layer, held in layers.items():
        if len(held) == 1:
            ((kind, (_, name)),) = held.items()
            lacking = "values" if kind == "k" else "keys"
            raise WeightsError(f"{name} has no counterpart for {lacking}: {WAY_OUT}")
        made[layer] = CacheScales(held["k"][0], held["v"][0])
    return FoundScales(made, tuple(names))


def _number(files: Files, entry: Entry) -> float:
    raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
    files.open(entry.file)
    files.read_into(entry.file, entry.start, raw.numpy().data)
    values = raw.view(entry.dtype).double()
    if len(values.unique()) != 1:
        raise WeightsError(
            f"{entry.name} holds {len(values)} scales, a cache here has one for all heads of a layer: {WAY_OUT}"
        )
    value = float(values[0])
    if not math.isfinite(value) or value <= 0:
        raise WeightsError(f"{entry.name} is {value}, and a scale is above 0: {WAY_OUT}")
    return value
