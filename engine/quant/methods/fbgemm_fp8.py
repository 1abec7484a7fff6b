"""quant_method "fbgemm_fp8", as FBGEMM's quantizer writes it: a scale a row, inputs rounded by row. No torch."""

from __future__ import annotations

from engine.models.reader import Reader
from engine.quant.method import Uniform
from engine.quant.module_names import listed
from engine.quant.scheme import Fp8Scheme

# What FBGEMM's configuration has where a config.json does not say it.
BOUND = 1200.0


def read(reader: Reader) -> Uniform:
    """Raises ConfigError for a value that is not implemented."""
    bound = reader.positive("activation_scale_ub", BOUND)
    names = reader.items(str, "modules_to_not_convert") or []
    stored = Fp8Scheme("dynamic by token", largest=bound)
    return Uniform(stored, listed(reader.where, names, with_parts=True))
