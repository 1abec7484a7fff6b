"""Whether the cache holds 8-bit floats, by the settings and by what a checkpoint says of itself. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from engine.models.reader import ConfigError, Reader, shown

log = logging.getLogger(__name__)

# What compressed-tensors says of a scheme beside what is required: how scales were found, dtypes they were stored from.
SILENT = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "group_size", "block_structure", "actorder")
# What AutoFP8, and others beside quant_method "fp8", say of a checkpoint that has scales: vLLM leaves its cache
# unquantized unless it is asked.
CALIBRATED = "static"
WAY_OUT = "set cache.dtype to 16bit to serve it with an unquantized cache"


def declared(config: Mapping[str, Any], modelopt: Mapping[str, Any]) -> bool:
    """Whether a checkpoint says that its cache is to hold 8-bit floats: config.json by `kv_cache_scheme`
    (compressed-tensors) or `kv_cache_quant_algo` (modelopt), or modelopt's own hf_quant_config.json.

    Raises ConfigError for a cache of another kind.
    """
    found = False
    said = config.get("quantization_config") or config.get("compression_config")
    for where, values in (("config.json: quantization_config", said), ("hf_quant_config.json", modelopt)):
        for place, part in _parts(where, values):
            scheme, kind = part.get("kv_cache_scheme"), part.get("kv_cache_quant_algo")
            if scheme == CALIBRATED:
                scheme = None
            if isinstance(scheme, str):
                # Early exports of modelopt give the algorithm by this key.
                scheme, kind = None, kind or scheme
            if scheme is not None:
                _check(scheme, f"{place}: kv_cache_scheme")
            if kind not in (None, "FP8"):
                raise ConfigError(f"{place}: kv_cache_quant_algo = {shown(kind)} is not implemented, FP8 is: {WAY_OUT}")
            found = found or scheme is not None or kind is not None
    return found


def _parts(where: str, values: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(values, Mapping):
        return []
    inner = values.get("quantization")
    return [(where, values), *([(f"{where}: quantization", inner)] if isinstance(inner, Mapping) else [])]


def _check(scheme: Any, where: str) -> None:
    if not isinstance(scheme, Mapping):
        raise ConfigError(f"{where} must be an object, not {type(scheme).__name__}")
    reader = Reader(scheme, where)
    try:
        reader.require("type", "float")
        reader.require("num_bits", 8)
        reader.require("strategy", "tensor", default="tensor")
        reader.require("symmetric", True, default=True)
        reader.require("dynamic", False, default=False)
        reader.skip(*SILENT)
        reader.finish()
    except ConfigError as error:
        raise ConfigError(f"{error}: {WAY_OUT}") from None


def holds_fp8(setting: str, says: bool) -> bool:
    """Whether caches hold 8-bit floats, by cache.dtype and by what the checkpoint says. `auto` follows the checkpoint,
    as vLLM does."""
    fp8 = setting == "fp8" or (setting == "auto" and says)
    if fp8 and setting == "auto":
        log.info("the checkpoint says that its cache holds 8-bit floats (cache.dtype = 16bit leaves it unquantized)")
    return fp8
