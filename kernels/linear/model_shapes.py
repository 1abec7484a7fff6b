"""Products of a layer of published models, as cases have them."""

from __future__ import annotations

from typing import Any

# Of Qwen3-8B: name, outputs (of gate and up each), inputs, what is fused; none is small.
QWEN3_8B: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("qkv", 6144, 4096, {"small": False, "norm": True}),
    ("out", 4096, 4096, {"small": False, "residual": True}),
    ("gate and up", 12288, 4096, {"small": False, "norm": True, "activation": "silu"}),
    ("down", 4096, 12288, {"small": False, "residual": True}),
)
