"""Inputs of RMS norm."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, deterministic, randn


def case(
    name: str, dtype: torch.dtype, t: int, e: int, residual: bool = False, offset: float = 0.0, small: bool = True
) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(generator, device, dtype, t, e, scale=3.0),
            "weight": randn(generator, device, dtype, e),
            "eps": 1e-6,
            "residual": randn(generator, device, dtype, t, e) if residual else None,
            "offset": offset,
        }

    moved = (t * e * (4 if residual else 2) + e) * dtype.itemsize
    return Case(name, dtype, make, TOLERANCES[dtype], bytes=moved, flops=5 * t * e, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [case(f"T{t} E{e}", dtype, t, e) for t, e in ((1, 64), (63, 123), (123, 1311))]
        made.append(case("T3 E2560 residual", dtype, 3, 2560, residual=True))
        made.append(case("T63 E123 residual, offset", dtype, 63, 123, residual=True, offset=1.0))
    made.append(case("no tokens", torch.float32, 0, 64, residual=True))
    for t in (1, 64, 8192):
        made.append(case(f"T{t} Qwen3-4B residual", torch.bfloat16, t, 2560, residual=True, small=False))
    return made + deterministic(made, "T63 E123", "T8192 Qwen3-4B residual")
