"""quant_method "w4afp8", as SGLang and vLLM read it: experts of 4-bit integers whose inputs are 8-bit floats, and
8-bit floats by blocks for everything else. No torch."""

from __future__ import annotations

from engine.models.reader import Reader
from engine.quant.method import Uniform
from engine.quant.module_names import listed
from engine.quant.scheme import Fp8Scheme, PackedScheme

GROUP = 128
EXPERTS = PackedScheme("w4afp8", 4, GROUP, activations="static", number="fp8")
OTHERS = Fp8Scheme("dynamic by 128", (128, 128))


def read(reader: Reader) -> Uniform:
    """Raises ConfigError for a value that is not implemented."""
    reader.require("group_size", GROUP, default=GROUP)
    reader.require("activation_scheme", "dynamic", default="dynamic")
    reader.require("fmt", "e4m3", default="e4m3")
    block = reader.items(int, "weight_block_size")
    reader.check(block in (None, [128, 128]), f"weight_block_size = {block} is not implemented, [128, 128] is")
    keys = ("ignored_layers", "modules_to_not_convert", "ignore")
    names = [name for key in keys for name in reader.items(str, key) or []]
    return Uniform(OTHERS, listed(reader.where, names, with_parts=True), EXPERTS)
