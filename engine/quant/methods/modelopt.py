"""quant_method "modelopt", as NVIDIA's Model Optimizer writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.models.reader import ConfigError, Reader
from engine.quant.method import Uniform
from engine.quant.module_names import NOTHING, ModuleNames, globs
from engine.quant.scheme import MX_GROUP, Fp4Scheme, Fp8Scheme, Scheme

# quant_algo → how a projection is stored. A scale of inputs is given for FP8. FP8_PB_WO is of weights alone, by blocks.
ALGORITHMS: dict[str, Scheme] = {
    "FP8": Fp8Scheme("static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme("dynamic by token"),
    "FP8_PB_WO": Fp8Scheme("as they are", (128, 128)),
    "MXFP8": Fp8Scheme("dynamic by 32", (1, MX_GROUP), power_of_two=True),
    "NVFP4": Fp4Scheme("modelopt", True),
    "W4A16_NVFP4": Fp4Scheme("modelopt"),
}
# Of which each layer says its own.
MIXED = "MIXED_PRECISION"
# Algorithms whose inputs are multiplied by a tensor of each module before its product.
SMOOTHED = ("NVFP4_AWQ", "W4A16_AWQ", "W4A8_AWQ")
# What a TensorRT-LLM checkpoint says beside an algorithm, and when it says nothing.
UNUSED = {"has_zero_point": False, "pre_quant_scale": False}


@dataclass(frozen=True, slots=True)
class ModeloptMixed:
    """What `layers` names, a module or one that it is a part of, is stored so; the nearest name holds. Everything else,
    and what `ignored` holds, is stored as it is."""

    layers: Mapping[str, Scheme] = field(hash=False)
    ignored: ModuleNames = NOTHING

    @property
    def steps(self) -> int:
        return self.ignored.steps + 1

    def scheme(self, module: str) -> Scheme | None:
        name = "" if self.ignored.hold(module) else module
        while name:
            if name in self.layers:
                return self.layers[name]
            name = name.rpartition(".")[0]
        return None


def read(reader: Reader) -> Uniform | ModeloptMixed | None:
    """None where the cache alone is quantized. Raises ConfigError for a value that is not implemented."""
    # The same in other words, and who wrote it.
    reader.skip("config_groups", "producer", "version")
    reader.require("quant_library", "modelopt", default="modelopt")
    cache = "kv_cache_quant_algo" in reader or "kv_cache_scheme" in reader
    reader.skip("kv_cache_quant_algo", "kv_cache_scheme")  # engine.quant.cache reads them
    names = (reader.items(str, "ignore") or []) + (reader.items(str, "exclude_modules") or [])
    ignored = globs(reader.where, names)
    if "quant_algo" not in reader and cache:
        return None
    if "quant_algo" in reader and str(reader.read(object, "quant_algo")).upper() == MIXED:
        _unused(reader)
        # Of layers that say none of their own.
        reader.require("group_size", None, 16, default=None)
        return ModeloptMixed(_layers(reader), ignored)
    return Uniform(_stored(reader, (MIXED,)), ignored)


def _unused(reader: Reader) -> None:
    for key, value in UNUSED.items():
        reader.require(key, value, default=value)


def _layers(reader: Reader) -> dict[str, Scheme]:
    layers = reader.read(dict, "quantized_layers")
    made: dict[str, Scheme] = {}
    for name, values in layers.items():
        where = f"{reader.where}: quantized_layers: {name}"
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be an object")
        if "*" in name:
            raise ConfigError(f"{where}: a name is needed, and patterns are not implemented there")
        own = Reader(values, where)
        made[name] = _stored(own)
        own.finish()
    reader.check(bool(made), f"quant_algo = {MIXED} needs quantized_layers, which name what is quantized")
    return made


def _stored(reader: Reader, others: tuple[str, ...] = ()) -> Scheme:
    """What `quant_algo`, in letters of either case, and `group_size` say."""
    said = reader.read(str, "quant_algo")
    known = ", ".join((*ALGORITHMS, *others))
    smoothed = (
        f"quant_algo = {said!r} is not implemented: inputs are multiplied by pre_quant_scale first, for which no layer "
        "has a place. Use a checkpoint of AutoAWQ or compressed-tensors, or one with an algorithm that is implemented: "
    )
    reader.check(said.upper() not in SMOOTHED, f"{smoothed}{known}")
    reader.check(said.upper() in ALGORITHMS, f"quant_algo = {said!r} is not implemented; implemented: {known}")
    _unused(reader)
    stored = ALGORITHMS[said.upper()]
    if isinstance(stored, Fp4Scheme):
        reader.require("group_size", 16, default=16)
    elif isinstance(stored, Fp8Scheme) and stored.block is not None:
        width = stored.block[1]
        reader.require("group_size", None, width, list(stored.block), default=None)
    else:
        reader.refuse("group_size", "8-bit floats are scaled by rows or as a whole")
    return stored
