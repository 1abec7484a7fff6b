"""Cases of the merge into residual streams."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def case(name: str, dtype: torch.dtype, t: int, n: int, hidden: int, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(g, device, dtype, t, hidden),
            "streams": randn(g, device, dtype, t, n, hidden),
            "post": randn(g, device, torch.float32, t, n),
            "comb": randn(g, device, torch.float32, t, n, n),
        }

    size = t * hidden * dtype.itemsize
    return Case(name, dtype, make, TOLERANCES[dtype], (2 * n + 1) * size, 2 * t * hidden * n * (n + 1), small=small)


def cases() -> list[Case]:
    return [
        case("four streams", torch.float32, 3, 4, 1030),
        case("three streams, odd width", torch.float32, 2, 3, 27),
        case("bfloat16", torch.bfloat16, 2, 4, 64),
        case("no tokens", torch.float32, 0, 4, 16),
        case("64 tokens, 4 streams of 4096", torch.bfloat16, 64, 4, 4096, small=False),
        case("4096 tokens, 4 streams of 4096", torch.bfloat16, 4096, 4, 4096, small=False),
    ]
