"""Cases of a product and the norm behind it."""

from __future__ import annotations

from typing import Any

import torch

from kernels.linear.cases import FUSED
from kernels.registry import Case
from kernels.testing import randn
from kernels.weight import Dense


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    n: int,
    k: int,
    offset: float = 0.0,
    bias: bool = False,
    small: bool = True,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(g, device, dtype, t, k),
            "weight": Dense(randn(g, device, dtype, n, k, scale=k**-0.5)),
            "residual": randn(g, device, dtype, t, n),
            "norm_weight": randn(g, device, dtype, n),
            "eps": 1e-6,
            "offset": offset,
            "bias": randn(g, device, dtype, n) if bias else None,
        }

    moved = (n * k + t * k + 3 * t * n + n) * dtype.itemsize
    return Case(name, dtype, make, FUSED[dtype], moved, 2 * t * n * k + 6 * t * n, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    made = [
        case("odd sizes", f32, 5, 123, 60),
        case("bias and offset", f32, 3, 96, 64, offset=1.0, bias=True),
        case("bfloat16", bf16, 33, 96, 128),
        case("no tokens", f32, 0, 64, 64),
    ]
    sizes = ((2048, 2048), (2048, 4096), (2040, 2560), (4096, 4096))
    made += [case(f"{t} tokens, {k} to {n}", bf16, t, n, k, small=False) for n, k in sizes for t in (17, 41, 64)]
    made += [case(f"{t} tokens, 2048 to 2048", bf16, t, 2048, 2048, offset=1.0, small=False) for t in (33, 8192)]
    return made
