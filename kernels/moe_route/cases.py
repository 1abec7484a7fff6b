"""Cases of expert routing.

Inputs are small multiples of powers of two, so that every sum is exact in any order: scores that differ, differ on both
sides, equal ones are equal on both, and experts are compared exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case, Tolerance
from kernels.routing import Routing
from kernels.testing import randint, randn

TOLERANCE = Tolerance(max_rel=1e-5, rms=5e-6)


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    e: int,
    k: int,
    small: bool = True,
    norm: bool = False,
    biased: bool = False,
    hashed: bool = False,
    narrow: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> Case:
    """`narrow`: the router has the inputs' dtype, which holds its values. `options` are those of `Routing`."""

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        signs = randint(g, device, 0, 2, t, hidden).to(dtype) * 2 - 1
        made: dict[str, Any] = {
            "x": signs,
            "router": randint(g, device, -32, 33, e, hidden).float()
            * (2.0**-5 * 2.0 ** -round(hidden**0.5).bit_length()),
            "deterministic": deterministic,
        }
        if narrow:
            made["router"] = made["router"].to(dtype)
        if norm:
            # rms(x) is 1: its norm is these weights, rounded to themselves
            made["norm_weight"] = 2.0 ** randint(g, device, -1, 2, hidden).to(dtype)
        bias = randn(g, device, torch.float32, e, scale=0.2) if biased else None
        table = None
        if hashed:
            table = torch.rand(50, e, generator=g, device=g.device).argsort(dim=-1)[:, :k].int().to(device)
            made["token_ids"] = randint(g, device, 0, 50, t)
        return {**made, "routing": Routing(k, bias=bias, table=table, **options)}

    moved = (
        e * hidden * (dtype.itemsize if narrow else 4) + t * hidden * dtype.itemsize * (2 if norm else 1) + t * k * 8
    )
    return Case(name, dtype, make, TOLERANCE, bytes=moved, flops=2 * t * e * hidden, small=small)


def cases() -> list[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    kimi: dict[str, Any] = {
        "score": "sigmoid",
        "biased": True,
        "scale": 2.827,
        "num_shared": 1,
        "norm": True,
        "narrow": True,
    }
    lite: dict[str, Any] = {"renormalize": False, "num_shared": 2, "norm": True, "narrow": True}
    grouped: dict[str, Any] = {"num_groups": 8, "top_groups": 3, "renormalize": False, "scale": 16.0}
    flash: dict[str, Any] = {"score": "sqrtsoftplus", "biased": True, "scale": 1.5, "num_shared": 1}
    top2: dict[str, Any] = {"score": "sigmoid", "biased": True, "num_groups": 4, "top_groups": 2, "group_score": "top2"}
    return [
        case("softmax, 128 experts, 8 of them", f32, 5, 64, 128, 8),
        case("norm before, bfloat16", bf16, 3, 96, 128, 8, norm=True),
        case("norm before, many tokens", bf16, 20, 96, 128, 8, norm=True),
        case("many tokens, odd sizes", f32, 37, 72, 20, 3),
        case("inputs split over programs", bf16, 17, 300, 40, 4),
        case("softmax, not renormalised, odd count, shared", f32, 3, 40, 60, 6, renormalize=False, num_shared=2),
        case("softmax, groups by their best", f32, 4, 48, 64, 6, **grouped),
        case("many tokens, groups by their best", f32, 19, 48, 64, 6, **grouped),
        case("softmax of biased logits", f32, 5, 48, 20, 4, biased=True, bias_of="logits"),
        case("many tokens, softmax of biased logits", bf16, 33, 72, 32, 4, biased=True, bias_of="logits", norm=True),
        case("sigmoid with correction, shared", f32, 4, 64, 384, 8, **kimi),
        case("sigmoid with correction, groups by their best two", f32, 4, 32, 32, 4, **top2),
        case("many tokens, groups by their best two", f32, 18, 32, 32, 4, **top2),
        case("root of softplus with correction", f32, 4, 32, 256, 6, score="sqrtsoftplus", biased=True, scale=1.5),
        case("root of softplus by token id", f32, 7, 32, 16, 3, score="sqrtsoftplus", hashed=True, scale=1.5),
        case("many tokens by token id", f32, 21, 32, 16, 3, score="sqrtsoftplus", hashed=True, num_shared=1),
        case("few tokens of a large router", bf16, 16, 1030, 130, 5, biased=True, score="sqrtsoftplus", scale=1.5),
        case("few tokens of a large router, norm before", bf16, 15, 2056, 140, 6, norm=True),
        case("1024 tokens, scores from bfloat16 parts", bf16, 1030, 80, 20, 3, norm=True),
        case("router of the inputs' dtype, few tokens", bf16, 3, 96, 40, 5, norm=True, narrow=True),
        case("router of the inputs' dtype", bf16, 20, 96, 40, 5, norm=True, narrow=True),
        case("router of the inputs' dtype, half precision", f16, 259, 72, 20, 3, narrow=True),
        case("1024 tokens, router of the inputs' dtype", bf16, 1030, 80, 20, 3, narrow=True),
        case("batch-invariant", f32, 18, 40, 16, 3, deterministic=True),
        case("few tokens, numbered from the 7th", f32, 3, 40, 20, 4, first=7),
        case("many tokens by token id, numbered from the 5th", f32, 21, 32, 16, 3, hashed=True, first=5),
        case("no tokens", f32, 0, 32, 16, 2),
        case("1 token, equal scores", f32, 1, 2, 100, 7),
        case("1 token, 8 of 128, 2048 wide", bf16, 1, 2048, 128, 8, small=False, norm=True, narrow=True),
        case("8 tokens, 8 of 128, 2048 wide", bf16, 8, 2048, 128, 8, small=False, norm=True, narrow=True),
        case("64 tokens, 8 of 128, 2048 wide", bf16, 64, 2048, 128, 8, small=False, norm=True, narrow=True),
        case("8192 tokens, 8 of 128, 2048 wide", bf16, 8192, 2048, 128, 8, small=False, norm=True, narrow=True),
        case("1 token, 6 of 64 and 2, 2048 wide", bf16, 1, 2048, 64, 6, small=False, **lite),
        case("8192 tokens, 6 of 64 and 2, 2048 wide", bf16, 8192, 2048, 64, 6, small=False, **lite),
        case("1 token, 8 of 384 and 1, 7168 wide", bf16, 1, 7168, 384, 8, small=False, **kimi),
        case("16 tokens, 8 of 384 and 1, 7168 wide", bf16, 16, 7168, 384, 8, small=False, **kimi),
        case("64 tokens, 8 of 384 and 1, 7168 wide", bf16, 64, 7168, 384, 8, small=False, **kimi),
        case("1 token, 6 of 256 and 1, 4096 wide", bf16, 1, 4096, 256, 6, small=False, **flash),
        case("2 tokens, 6 of 256 and 1, 4096 wide", bf16, 2, 4096, 256, 6, small=False, **flash),
        case("4 tokens, 6 of 256 and 1, 4096 wide", bf16, 4, 4096, 256, 6, small=False, **flash),
        case("16 tokens, 6 of 256 and 1, 4096 wide", bf16, 16, 4096, 256, 6, small=False, **flash),
    ]
