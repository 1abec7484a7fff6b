"""quant_method "compressed-tensors": groups of modules by targets, each with a format of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.models.reader import ConfigError, Reader
from engine.quant.methods.groups import group_size
from engine.quant.module_names import ModuleNames, listed
from engine.quant.scheme import (
    MX_GROUP,
    Activations,
    Fp4Layout,
    Fp4Scheme,
    Fp8Scheme,
    Int8Scheme,
    Layout,
    PackedScheme,
    Scheme,
)

# What a module is called by its class, and the end of the name of one that is no projection.
PROJECTION, EMBEDDING, EMBEDDED = "Linear", "Embedding", "embed_tokens"
# What stays the same whatever it says: how scales were found, and the dtypes that they were stored from.
SILENT = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
# Orders of inputs that a checkpoint says by a tensor, and those that it does not need to say.
ORDERED, IN_PLACE = ("group", "dynamic"), (None, "weight", "static")


@dataclass(frozen=True, slots=True)
class Targets:
    """Modules by their names, by patterns that these begin with, or by class: all projections, the embedding."""

    modules: ModuleNames
    projections: bool
    embedding: bool = False

    def rank(self, module: str) -> int:
        """3: by its name; 2: by a pattern; 1: by its class; 0: not at all."""
        if self.modules.name(module):
            return 3
        if self.modules.hold(module):
            return 2
        return int(self.embedding if module.endswith(EMBEDDED) else self.projections)


@dataclass(frozen=True, slots=True)
class Group:
    """What `targets` are stored as."""

    targets: Targets
    stored: Scheme


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """A name goes before a pattern, and a pattern before a class. What `ignored` matches is stored as it is."""

    groups: tuple[Group, ...]
    ignored: Targets

    @property
    def steps(self) -> int:
        return self.ignored.modules.steps + sum(group.targets.modules.steps for group in self.groups)

    def scheme(self, module: str) -> Scheme | None:
        if self.ignored.rank(module):
            return None
        ranked = [(group.targets.rank(module), group.stored) for group in self.groups]
        best = max(ranked, key=lambda found: found[0], default=(0, None))
        return best[1] if best[0] else None


def _targets(where: str, words: Collection[str]) -> Targets:
    """Names, classes, and patterns behind `re:`."""
    expressions = [word[3:] for word in words if word.startswith("re:")]
    names = (word for word in words if not word.startswith("re:"))
    return Targets(listed(where, names, expressions), PROJECTION in words, EMBEDDING in words)


def read(reader: Reader) -> CompressedTensors | None:
    """None where the cache alone is quantized.

    Raises ConfigError for a format, a scheme or a value of one that is not implemented.
    """
    reader.require("quantization_status", "compressed", "frozen", default="compressed")
    reader.skip("global_compression_ratio", "run_compressed", "version")
    _dense(reader)
    reader.refuse("transform_config", "weights behind a rotation are not read", {})
    cache = reader.optional(dict, "kv_cache_scheme")  # engine.quant.cache reads it
    whole = reader.optional(str, "format")
    groups = (reader.optional(dict, "config_groups") or {}) if cache else reader.read(dict, "config_groups")
    made = tuple(_group(f"{reader.where}: config_groups: {name}", held, whole) for name, held in groups.items())
    ignored = _targets(reader.where, reader.items(str, "ignore") or [])
    return CompressedTensors(made, ignored) if made or not cache else None


def _dense(reader: Reader) -> None:
    """Refuse a sparsity_config of weights that are stored without their zeros."""
    values = reader.optional(dict, "sparsity_config")
    if not values:
        return
    sparsity = Reader(values, f"{reader.where}: sparsity_config")
    sparsity.require("format", "dense")
    sparsity.skip("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets")
    sparsity.finish()


def _group(where: str, values: Any, whole: str | None) -> Group:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object")
    reader = Reader(values, where)
    own = reader.optional(str, "format") or whole
    reader.check(own in FORMATS, f"format = {own!r} is not implemented; implemented: {', '.join(FORMATS)}")
    targets = reader.items(str, "targets") or []
    reader.check(bool(targets), "targets must name what the group is about")
    weights = Reader(reader.read(dict, "weights"), f"{where}: weights")
    inputs = reader.optional(dict, "input_activations")
    reader.refuse("output_activations", "outputs are not quantized")
    reader.finish()
    stored = FORMATS[str(own)](weights, inputs, where)
    weights.finish()
    return Group(_targets(where, targets), stored)


def _floats(weights: Reader, inputs: dict[str, Any] | None, where: str) -> Scheme:
    strategy, block = _weights(weights, "float", "tensor", "channel", "block")
    return Fp8Scheme(_inputs(inputs, "float", strategy, where), block)


def _exponents(weights: Reader, inputs: dict[str, Any] | None, where: str) -> Scheme:
    """MXFP8: groups of 32 with a power of two."""
    _grouped_floats(weights, 8, "group", MX_GROUP, False)
    if inputs is not None:
        reader = Reader(inputs, f"{where}: input_activations")
        _grouped_floats(reader, 8, "group", MX_GROUP, True)
        reader.finish()
    return Fp8Scheme("as they are" if inputs is None else "dynamic by 32", (1, MX_GROUP), power_of_two=True)


def _integers(weights: Reader, inputs: dict[str, Any] | None, where: str) -> Scheme:
    if weights.read(int, "num_bits") == 4:
        return _packed(weights, inputs, where, "int-quantized")
    strategy, _ = _weights(weights, "int", "tensor", "channel")
    return Int8Scheme(_inputs(inputs, "int", strategy, where))


def _packed(weights: Reader, inputs: dict[str, Any] | None, where: str, layout: Layout = "pack-quantized") -> Scheme:
    """Integers of 4 bits, or of 8, in groups or by rows; inputs may be rounded to 8-bit integers or floats."""
    apart = layout == "int-quantized"
    weights.require("type", "int")
    bits = weights.require("num_bits", 4, 8)
    symmetric = weights.require("symmetric", True, *(() if apart else (False,)), default=True)
    weights.require("dynamic", False, default=False)
    grouped = weights.require("strategy", "group", "channel") == "group"
    group = group_size(weights, "group_size") if grouped else 0
    if not grouped:
        weights.require("group_size", None, -1, default=None)
    order = weights.require("actorder", *IN_PLACE, *(() if apart else ORDERED), default=None)
    weights.refuse("block_structure", "integers are not scaled by blocks")
    weights.skip(*SILENT)
    number: Literal["fp8", "int8"] = "fp8" if (inputs or {}).get("type") == "float" else "int8"
    rounds = _inputs(inputs, "float" if number == "fp8" else "int", "", where)
    ordered = order in ORDERED and group > 0
    return PackedScheme(layout, bits, group, not symmetric, ordered, activations=rounds, number=number)


def _fp4(layout: Fp4Layout, strategy: str, group: int) -> Callable[[Reader, dict[str, Any] | None, str], Scheme]:
    def read(weights: Reader, inputs: dict[str, Any] | None, where: str) -> Scheme:
        _grouped_floats(weights, 4, strategy, group, False)
        if inputs is not None:
            reader = Reader(inputs, f"{where}: input_activations")
            _grouped_floats(reader, 4, strategy, group, True, "local")
            reader.finish()
        return Fp4Scheme(layout, inputs is not None)

    return read


def _grouped_floats(reader: Reader, bits: int, strategy: str, group: int, *dynamic: object) -> None:
    reader.require("type", "float")
    reader.require("num_bits", bits)
    reader.require("symmetric", True, default=True)
    reader.require("dynamic", *dynamic, default=False)
    reader.require("strategy", strategy)
    reader.require("group_size", group)
    reader.refuse("actorder", "floats in groups have no order of activations", *IN_PLACE)
    reader.refuse("block_structure", "they are scaled by groups")
    reader.skip(*SILENT)


# format → what reads the weights and inputs of a group
FORMATS: dict[str, Callable[[Reader, dict[str, Any] | None, str], Scheme]] = {
    "float-quantized": _floats,
    "int-quantized": _integers,
    "mxfp4-pack-quantized": _fp4("mxfp4-pack-quantized", "group", 32),
    "mxfp8-quantized": _exponents,
    "naive-quantized": _floats,
    "nvfp4-pack-quantized": _fp4("nvfp4-pack-quantized", "tensor_group", 16),
    "pack-quantized": _packed,
}


def _weights(reader: Reader, kind: str, *strategies: str) -> tuple[str, tuple[int, int] | None]:
    """The strategy of scales, and the block that they are for."""
    reader.require("type", kind)
    reader.require("num_bits", 8)
    reader.require("symmetric", True, default=True)
    reader.require("dynamic", False, default=False)
    strategy: str = reader.require("strategy", *strategies)
    # A list may be written as text.
    text = reader.read(object, "block_structure", None) == "128x128"
    block = [128, 128] if text else reader.items(int, "block_structure")
    by_block = strategy == "block"
    reader.check(not by_block or block == [128, 128], f"block_structure = {block} is not implemented, [128, 128] is")
    reader.refuse("actorder", "numbers of 8 bits, one a byte, have no order of activations")
    reader.refuse("group_size", "numbers of 8 bits, one a byte, are not grouped along their inputs", -1)
    reader.skip(*SILENT)
    return strategy, (128, 128) if by_block else None


def _inputs(values: dict[str, Any] | None, kind: str, strategy: str, where: str) -> Activations:
    if values is None:
        return "as they are"
    reader = Reader(values, f"{where}: input_activations")
    reader.require("type", kind)
    reader.require("num_bits", 8)
    reader.require("symmetric", True, default=True)
    dynamic = reader.read(bool, "dynamic", False)
    by_block = strategy == "block"
    wanted = "group" if by_block else "token" if dynamic else "tensor"
    reader.require("strategy", wanted)
    reader.check(dynamic or not by_block, "dynamic = false does not go with blocks")
    reader.require("group_size", *((128,) if by_block else (None,)), default=None)
    reader.refuse("actorder", "inputs have no order of activations")
    reader.refuse("block_structure", "inputs have no blocks")
    reader.skip(*SILENT)
    reader.finish()
    return "dynamic by 128" if by_block else "dynamic by token" if dynamic else "static"
