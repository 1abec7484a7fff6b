"""Cases of the sum behind a norm."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def case(name: str, dtype: torch.dtype, t: int, e: int, offset: float = 0.0, small: bool = True) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(g, device, dtype, t, e, scale=3.0),
            "weight": randn(g, device, dtype, e),
            "eps": 1e-6,
            "residual": randn(g, device, dtype, t, e),
            "offset": offset,
        }

    return Case(name, dtype, make, TOLERANCES[dtype], (3 * t + 1) * e * dtype.itemsize, 6 * t * e, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        made += [case("odd sizes", dtype, 5, 123), case("offset", dtype, 3, 640, offset=1.0)]
    made.append(case("no tokens", torch.float32, 0, 64))
    made += [case(f"{t} tokens of 2560", torch.bfloat16, t, 2560, offset=1.0, small=False) for t in (1, 64, 8192)]
    return made
