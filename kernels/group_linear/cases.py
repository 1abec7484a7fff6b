"""Cases of the product by groups: dense weights, and 8-bit floats in blocks."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.sizes import cdiv
from kernels.testing import TOLERANCES, deterministic, randn
from kernels.weight import Dense, Fp8
from kernels.weight.inputs import Inputs


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    groups: int,
    size: int,
    outputs: int,
    *,
    fp8: bool = False,
    powers: bool = True,
    small: bool = True,
) -> Case:
    """fp8: the weight has scales for 128 by 128, powers of two or any numbers, and rounds inputs in other products."""

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        x = randn(g, device, dtype, t, groups * size)
        numbers = randn(g, device, dtype, groups, outputs, size, scale=size**-0.5)
        if not fp8:
            return {"x": x, "weight": Dense(numbers)}
        shape = (groups, cdiv(outputs, 128), cdiv(size, 128))
        scale = torch.rand(shape, generator=g, device=g.device).to(device) * size**-0.5 / 32 + 1e-5
        scale = scale.log2().round().exp2() if powers else scale
        data = (numbers.float() * 64 * size**0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"x": x, "weight": Fp8(data, scale, (128, 128), Inputs("fp8", 128, powers))}

    held = groups * size * outputs * (1 if fp8 else dtype.itemsize)
    moved = held + dtype.itemsize * groups * t * (size + outputs)
    return Case(name, dtype, make, TOLERANCES[dtype], moved, 2 * t * groups * size * outputs, small=small)


def cases() -> list[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    other: dict[str, Any] = {"fp8": True, "powers": False}
    made = [
        case("odd sizes", f32, 3, 2, 72, 37),
        case("many rows", f32, 70, 3, 40, 24),
        case("bfloat16", bf16, 17, 2, 64, 48),
        case("no tokens", f32, 0, 2, 16, 16),
        case("fp8, odd sizes", f32, 3, 2, 300, 200, **other),
        case("fp8, one row", bf16, 1, 3, 640, 136, fp8=True),
        case("fp8, any scales", bf16, 16, 2, 264, 48, **other),
        case("fp8, more rows", bf16, 17, 2, 384, 200, fp8=True),
        case("fp8, whole tile", f16, 64, 2, 130, 72, **other),
        case("fp8, many rows", bf16, 70, 2, 300, 136, fp8=True),
        case("fp8, no tokens", bf16, 0, 2, 128, 16, fp8=True),
    ]
    for t in (1, 64, 4096):
        made.append(case(f"{t} token{'s' * (t > 1)}, 8 groups of 4096", bf16, t, 8, 4096, 1024, small=False))
    for t in (1, 4, 16, 64, 4096):
        name = f"fp8, {t} token{'s' * (t > 1)}, 8 groups of 4096"
        made.append(case(name, bf16, t, 8, 4096, 1024, fp8=True, small=False))
    names = ("odd sizes", "many rows", "bfloat16", "fp8, odd sizes", "fp8, more rows", "fp8, many rows")
    return made + deterministic(made, *names, "fp8, 16 tokens, 8 groups of 4096")
