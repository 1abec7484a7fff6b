"""quant_method "mxfp4", as gpt-oss is published: experts of 4-bit floats, a power of two for 32 inputs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.reader import Reader
from engine.quant.module_names import NOTHING, ModuleNames, globs
from engine.quant.scheme import Fp4Scheme

STORED = Fp4Scheme("mxfp4-pack-quantized")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts are stored so, less those that `ignored` holds."""

    ignored: ModuleNames = NOTHING

    @property
    def steps(self) -> int:
        return self.ignored.steps

    def scheme(self, module: str) -> Fp4Scheme | None:
        return None if ".experts." not in module or self.ignored.hold(module) else STORED


def read(reader: Reader) -> Mxfp4:
    """Raises ConfigError for a value that is not implemented."""
    reader.require("dequantize", False, default=False)
    return Mxfp4(globs(reader.where, reader.items(str, "modules_to_not_convert") or (), with_parts=True))
