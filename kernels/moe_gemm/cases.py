"""Cases of the routed experts."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def _case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inter: int,
    e: int,
    k: int,
    small: bool = True,
    absent: int = 0,
    **options: Any,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        experts = torch.rand(t, e + absent, generator=g, device=g.device).argsort(dim=-1)[:, :k].int()
        return {
            "x": randn(g, device, dtype, t, hidden),
            "gate_up": randn(g, device, dtype, e, 2 * inter, hidden, scale=hidden**-0.5),
            "down": randn(g, device, dtype, e, hidden, inter, scale=inter**-0.5),
            "weights": torch.rand(t, k, generator=g, device=g.device).to(device),
            "experts": experts.to(device),
            **options,
        }

    hit = min(e, t * k)
    moved = dtype.itemsize * (hit * 3 * hidden * inter + 2 * t * hidden) + t * k * 8
    return Case(name, dtype, make, TOLERANCES[dtype], bytes=moved, flops=6 * t * k * hidden * inter, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    return [
        _case("one token", f32, 1, 40, 24, 8, 3),
        _case("few pairs, odd sizes", f32, 5, 33, 17, 6, 2),
        _case("few pairs, gelu", bf16, 3, 64, 32, 4, 2, activation="gelu_tanh"),
        _case("few pairs, experts that live elsewhere", f32, 6, 32, 16, 4, 3, absent=4),
        _case("tiles, odd sizes", f32, 45, 40, 24, 5, 3),
        _case("tiles, clipped", bf16, 40, 48, 32, 6, 2, limit=0.5),
        _case("tiles, experts that live elsewhere", f32, 40, 32, 16, 4, 3, absent=4),
        _case("no tokens", f32, 0, 32, 16, 4, 2),
        _case("1 token, 128 experts of 768", bf16, 1, 2048, 768, 128, 8, small=False),
        _case("64 tokens, 128 experts of 768", bf16, 64, 2048, 768, 128, 8, small=False),
        _case("4096 tokens, 128 experts of 768", bf16, 4096, 2048, 768, 128, 8, small=False),
        _case("1 token, 64 experts of 1408", bf16, 1, 2048, 1408, 64, 6, small=False),
        _case("64 tokens, 64 experts of 1408", bf16, 64, 2048, 1408, 64, 6, small=False),
        _case("4096 tokens, 64 experts of 1408", bf16, 4096, 2048, 1408, 64, 6, small=False),
    ]
