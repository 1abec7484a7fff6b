"""quant_method "modelopt", as NVIDIA's Model Optimizer writes it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.reader import Reader
from engine.quant.module_names import NOTHING, ModuleNames, globs
from engine.quant.scheme import Fp4Scheme, Fp8Scheme, Scheme

# quant_algo → how every projection that is not left out is stored. A scale of inputs is given for FP8.
ALGORITHMS: dict[str, Scheme] = {
    "FP8": Fp8Scheme("static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme("dynamic by token"),
    "NVFP4": Fp4Scheme("modelopt", True),
    "W4A16_NVFP4": Fp4Scheme("modelopt"),
}


@dataclass(frozen=True, slots=True)
class Modelopt:
    """Every projection is stored as `stored`, less those that `ignored` holds."""

    stored: Scheme
    ignored: ModuleNames = NOTHING

    @property
    def steps(self) -> int:
        return self.ignored.steps

    def scheme(self, module: str) -> Scheme | None:
        return None if self.ignored.hold(module) else self.stored


def read(reader: Reader) -> Modelopt:
    """Raises ConfigError for a value that is not implemented."""
    algorithm = reader.require("quant_algo", *ALGORITHMS)
    # The same in other words, and who wrote it.
    reader.skip("config_groups", "producer", "version")
    stored = ALGORITHMS[algorithm]
    if isinstance(stored, Fp4Scheme):
        reader.require("group_size", 16, default=16)
    else:
        reader.refuse("group_size", "8-bit floats are scaled by rows or as a whole")
    reader.skip("kv_cache_quant_algo", "kv_cache_scheme")  # engine.quant.cache reads them
    names = (reader.items(str, "ignore") or []) + (reader.items(str, "exclude_modules") or [])
    return Modelopt(stored, globs(reader.where, names))
