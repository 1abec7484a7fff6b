"""Cases of the output gate."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def case(name: str, dtype: torch.dtype, t: int, n: int, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        return {"x": randn(g, device, dtype, t, n), "gate": randn(g, device, dtype, t, n + 7)[:, 7:]}

    return Case(name, dtype, make, TOLERANCES[dtype], 3 * t * n * dtype.itemsize, 5 * t * n, small=small)


def cases() -> list[Case]:
    return [
        case("odd sizes", torch.float32, 3, 1037),
        case("bfloat16", torch.bfloat16, 5, 96),
        case("no tokens", torch.float32, 0, 16),
        case("64 tokens of 4096", torch.bfloat16, 64, 4096, small=False),
        case("8192 tokens of 4096", torch.bfloat16, 8192, 4096, small=False),
    ]
