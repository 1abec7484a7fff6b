"""quant_method "fbgemm_fp8", as FBGEMM's quantizer writes it: a scale a row, inputs rounded by row. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.reader import Reader
from engine.quant.module_names import NOTHING, ModuleNames, listed
from engine.quant.scheme import Fp8Scheme

# What FBGEMM's configuration has where a config.json does not say it.
BOUND = 1200.0


@dataclass(frozen=True, slots=True)
class FbgemmFp8:
    """Every projection is stored so, less those that `ignored` holds."""

    stored: Fp8Scheme
    ignored: ModuleNames = NOTHING

    @property
    def steps(self) -> int:
        return self.ignored.steps

    def scheme(self, module: str) -> Fp8Scheme | None:
        return None if self.ignored.hold(module) else self.stored


def read(reader: Reader) -> FbgemmFp8:
    """Raises ConfigError for a value that is not implemented."""
    bound = reader.positive("activation_scale_ub", BOUND)
    names = reader.items(str, "modules_to_not_convert") or []
    stored = Fp8Scheme("dynamic by token", largest=bound)
    return FbgemmFp8(stored, listed(reader.where, names, with_parts=True))
