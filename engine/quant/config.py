"""What a checkpoint's config.json says of how its weights are stored. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.models.reader import ConfigError, Reader
from engine.quant.method import Method, Uniform
from engine.quant.methods import auto_round, awq, compressed_tensors, fbgemm_fp8, fp8, gptq, modelopt, mxfp4, w4afp8
from engine.quant.scheme import Fp4Scheme

# quant_method → what reads the object around it
METHODS: dict[str, Callable[[Reader], Method | None]] = {
    "auto-round": auto_round.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fbgemm_fp8.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "intel/auto-round": auto_round.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
    "w4afp8": w4afp8.read,
}
# Read here and by no family. "quantization" is what MLX writes.
KEYS = ("quantization_config", "compression_config", "quantization")


def read(values: dict[str, Any], file: str = "config.json") -> Method | None:
    """The method that the content of a config.json names, None for weights that are stored as they are. file: what
    messages call it.

    Raises ConfigError for a method, or a value of one, that is not implemented.
    """
    found = [
        (f"{where}{key}", part[key]) for where, part in _parts(values) for key in KEYS if part.get(key) is not None
    ]
    if not found:
        return None
    where, said = found[0]
    if any(other != said for _, other in found[1:]):
        raise ConfigError(f"{file}: {' and '.join(name for name, _ in found)} say different things; keep one")
    if not isinstance(said, dict):
        raise ConfigError(f"{file}: {where} must be an object, not {type(said).__name__}")
    reader = Reader(_named(said), f"{file}: {where}")
    name = reader.require("quant_method", *METHODS)
    made = METHODS[name](reader)
    reader.finish()
    if name == "fp8" and isinstance(made, Uniform) and "fp4" in (values.get("expert_dtype"), said.get("expert_dtype")):
        return replace(made, experts=Fp4Scheme("scale"))
    return made


def _named(said: dict[str, Any]) -> dict[str, Any]:
    """With the quant_method that early exports of modelopt do not say; they may hold hf_quant_config.json as it is."""
    inner = said.get("quantization")
    if isinstance(inner, dict) and said.get("quant_method") in (None, "modelopt"):
        said = {**{key: value for key, value in said.items() if key != "quantization"}, **inner}
    early = said.get("quant_method") is None and ("quant_algo" in said or said.get("quant_library") == "modelopt")
    return {**said, "quant_method": "modelopt"} if early else said


def _parts(values: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    inner = values.get("text_config")
    return [("", values), *([("text_config.", inner)] if isinstance(inner, dict) else [])]
