"""quant_method "fp8": by blocks, or one scale a tensor."""

from __future__ import annotations

from engine.models.reader import Reader
from engine.quant.method import Uniform
from engine.quant.module_names import listed
from engine.quant.scheme import Activations, Fp8Scheme


def read(reader: Reader) -> Uniform:
    """Raises ConfigError for a value that is not implemented."""
    scheme = reader.require("activation_scheme", "dynamic", "static", default="dynamic")
    reader.require("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    reader.require("dequantize", False, default=False)
    ue8m0 = reader.optional(str, "scale_fmt") is not None and reader.require("scale_fmt", "ue8m0", "float") == "ue8m0"
    reader.skip("kv_cache_scheme")  # engine.quant.cache reads it
    block = reader.items(int, "weight_block_size")
    by_block = block is not None
    reader.check(not by_block or block == [128, 128], f"weight_block_size = {block} is not implemented, [128, 128] is")
    reader.check(not (by_block and scheme == "static"), "activation_scheme = 'static' does not go with blocks")
    reader.require("expert_dtype", "fp4", "fp8", default="fp8")  # engine.quant.config makes of it what it means
    names = (reader.items(str, "modules_to_not_convert") or []) + (reader.items(str, "ignored_layers") or [])
    activations: Activations = "dynamic by 128" if by_block else "static" if scheme == "static" else "dynamic by token"
    stored = Fp8Scheme(activations, (128, 128) if by_block else None, ue8m0)
    return Uniform(stored, listed(reader.where, names, with_parts=True))
