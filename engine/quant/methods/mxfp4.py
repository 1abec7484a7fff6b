"""quant_method "mxfp4", as gpt-oss is published: experts of 4-bit floats, a power of two for 32 inputs. No torch."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from engine.models.reader import Reader
from engine.quant.scheme import Fp4Scheme

STORED = Fp4Scheme("mxfp4-pack-quantized")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts are stored so, less modules that a pattern of `ignored`, or one of their parents, matches."""

    ignored: tuple[str, ...] = ()

    def scheme(self, module: str) -> Fp4Scheme | None:
        left_out = any(fnmatch.fnmatchcase(module, pattern) for name in self.ignored for pattern in (name, f"{name}.*"))
        return None if left_out or ".experts." not in module else STORED


def read(reader: Reader) -> Mxfp4:
    """Raises ConfigError for a value that is not implemented."""
    reader.require("dequantize", False, default=False)
    return Mxfp4(tuple(reader.items(str, "modules_to_not_convert") or ()))
