"""Cases of the mix of residual streams."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case, Tolerance
from kernels.testing import TOLERANCES, deterministic, randn

FLOAT32 = Tolerance(max_rel=2e-5, rms=5e-6)  # twenty rounds of divisions stand behind comb


def case(name: str, dtype: torch.dtype, t: int, n: int, hidden: int, iterations: int, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        f32 = torch.float32
        return {
            "streams": randn(g, device, dtype, t, n, hidden),
            "fn": randn(g, device, f32, n * (2 + n), n * hidden, scale=(n * hidden) ** -0.5),
            "base": randn(g, device, f32, n * (2 + n)),
            "scale": randn(g, device, f32, 3),
            "norm_eps": 1e-6,
            "iterations": iterations,
            "eps": 1e-6,
        }

    moved = t * (n + 1) * hidden * dtype.itemsize + 4 * n * (2 + n) * n * hidden
    tolerance = FLOAT32 if dtype == torch.float32 else TOLERANCES[dtype]
    return Case(name, dtype, make, tolerance, moved, 2 * t * n * hidden * (n * (2 + n) + 2), small=small)


def cases() -> list[Case]:
    made = [
        case("four streams", torch.float32, 3, 4, 40, 20),
        case("three streams, odd width", torch.float32, 2, 3, 27, 2),
        case("bfloat16", torch.bfloat16, 2, 4, 64, 20),
        case("no tokens", torch.float32, 0, 4, 16, 2),
        case("64 tokens, 4 streams of 4096", torch.bfloat16, 64, 4, 4096, 20, small=False),
        case("4096 tokens, 4 streams of 4096", torch.bfloat16, 4096, 4, 4096, 20, small=False),
    ]
    return made + deterministic(made, "four streams", "three streams, odd width")
