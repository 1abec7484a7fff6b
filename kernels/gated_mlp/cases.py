"""Cases of two products with a gated activation between them: dense weights, and 8-bit floats."""

from __future__ import annotations

from typing import Any

import torch

from kernels.linear.cases import FUSED, QUANTIZED
from kernels.linear.cases import case as linear_case
from kernels.linear.cases import fp8_case as fp8_linear_case
from kernels.registry import Case
from kernels.testing import randn
from kernels.weight.inputs import Inputs

Block = tuple[int, int] | None


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inner: int,
    *,
    fp8: tuple[Block, Inputs] | None = None,
    activation: str = "silu",
    limit: float | None = None,
    bias: bool = False,
    norm: bool = False,
    residual: bool = False,
    deterministic: bool = False,
    small: bool = True,
) -> Case:
    """fp8: block of both weights and how their inputs are quantized; None: dense weights."""
    ends: list[Any] = [(inner, hidden, {"norm": norm, "activation": activation}), (hidden, inner, {})]
    up, down = (
        linear_case("", dtype, t, n, k, bias=bias, **more)
        if fp8 is None
        else fp8_linear_case("", dtype, t, n, k, *fp8, bias=bias, **more)
        for n, k, more in ends
    )

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        first, last = up.make(device, g), down.make(device, g)
        return {
            "x": first["x"],
            "gate_up": first["weight"],
            "down": last["weight"],
            "activation": activation,
            "limit": limit,
            "gate_up_bias": first["bias"],
            "down_bias": last["bias"],
            "norm_weight": first["norm_weight"],
            "eps": 1e-6,
            "offset": 0.0,
            "residual": randn(g, device, dtype, t, hidden) if residual else None,
            "deterministic": deterministic,
        }

    tolerance = FUSED[dtype] if fp8 is None else QUANTIZED
    return Case(name, dtype, make, tolerance, up.bytes + down.bytes, up.flops + down.flops, small=small)


def cases() -> list[Case]:
    f32, bf16, f16, square = torch.float32, torch.bfloat16, torch.float16, (128, 128)
    groups, rows, static = Inputs("fp8", 128), Inputs("fp8"), Inputs("fp8", scale=torch.tensor(0.01))
    powers = Inputs("fp8", 128, True)
    gelu: dict[str, Any] = {"activation": "gelu_tanh", "residual": True}
    made = [
        case("odd sizes", f32, 5, 60, 36, bias=True, norm=True, residual=True),
        case("a limit", f32, 3, 64, 48, limit=0.5),
        case("gelu", bf16, 7, 64, 48, activation="gelu_tanh", norm=True),
        case("batch-invariant", bf16, 7, 64, 48, norm=True, deterministic=True),
        case("fp8 blocks, few rows", bf16, 5, 128, 256, fp8=(square, groups), norm=True, residual=True),
        case("no tokens", bf16, 0, 64, 48),
        case(
            "fp8 blocks, one row, a limit", bf16, 1, 1168, 256, fp8=(square, groups), limit=0.25, norm=True, bias=True
        ),
        case("fp8 blocks, one row, gelu, a limit", f16, 1, 640, 128, fp8=(square, powers), limit=0.1, **gelu),
        case(
            "fp8 blocks, one row, a limit, batch-invariant",
            bf16,
            1,
            384,
            128,
            fp8=(square, powers),
            limit=0.25,
            deterministic=True,
        ),
        case(
            "T1 fp8 blocks, a limit", bf16, 1, 4096, 2048, fp8=(square, powers), limit=0.25, residual=True, small=False
        ),
    ]
    for t in (65, 96, 1024, 8192):
        for name, fp8 in (("blocks", (square, groups)), ("rows", (None, rows)), ("a given scale", (None, static))):
            given: Any = {"fp8": fp8, "norm": True, "residual": True, "small": False}
            made.append(case(f"T{t} fp8, {name}", bf16, t, 2048, 5632, **given))
    made.append(case("T300 fp8, gelu, a limit", bf16, 300, 2048, 5632, fp8=(None, rows), limit=2.0, small=False,
                     activation="gelu_tanh", bias=True, residual=True))  # fmt: skip
    return made
