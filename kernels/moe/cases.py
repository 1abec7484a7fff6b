"""Cases of routed experts: the inputs of their choice, compared exactly there, and experts' matrices."""

from __future__ import annotations

from typing import Any

import torch

from kernels.moe_gemm.cases import case as gemm_case
from kernels.moe_route.cases import case as route_case
from kernels.registry import Case
from kernels.testing import TOLERANCES


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inter: int,
    e: int,
    k: int,
    small: bool = True,
    num_shared: int = 0,
    residual: bool = True,
    activation: str = "silu",
    limit: float | None = None,
    held: int | None = None,
    experts_biased: bool = False,
    **routing: Any,
) -> Case:
    """held: experts whose matrices are here; None: all. `routing` as in the cases of `moe_route`."""
    route = route_case(name, dtype, t, hidden, e, k, small, num_shared=num_shared, **routing)
    products: dict[str, Any] = {
        "residual": residual,
        "activation": activation,
        "limit": limit,
        "biased": experts_biased,
    }
    tables = e + num_shared if held is None else held
    gemm = gemm_case(name, dtype, t, hidden, inter, tables, k + num_shared, small, **products)

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        given = gemm.make(device, g)
        for chosen in ("weights", "experts"):
            del given[chosen]
        return {**given, **route.make(device, g)}

    moved, flops = route.bytes + gemm.bytes, route.flops + gemm.flops
    return Case(name, dtype, make, TOLERANCES[dtype], bytes=moved, flops=flops, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    sigmoid: dict[str, Any] = {"score": "sigmoid", "biased": True, "scale": 2.827}
    softplus: dict[str, Any] = {"score": "sqrtsoftplus", "scale": 1.5}
    oai: dict[str, Any] = {"activation": "swiglu_oai", "limit": 1.0, "experts_biased": True}
    oai |= {"biased": True, "bias_of": "logits"}
    grouped: dict[str, Any] = {"num_groups": 4, "top_groups": 2}
    qwen: dict[str, Any] = {"norm": True, "narrow": True, "small": False}
    lite: dict[str, Any] = {"num_shared": 2, "renormalize": False, **qwen}
    return [
        case("1 token, norm before", bf16, 1, 64, 32, 16, 4, norm=True),
        case("1 token, odd sizes", f32, 1, 72, 20, 11, 3, residual=False),
        case("few tokens, odd sizes, norm before", f32, 3, 72, 20, 11, 3, norm=True),
        case("few tokens, not renormalised", bf16, 3, 48, 24, 12, 3, renormalize=False, scale=2.5),
        case("few tokens, equal scores", f32, 2, 2, 8, 40, 7),
        case("few tokens, gelu, clipped", f32, 2, 40, 16, 6, 2, activation="gelu_tanh", limit=0.5),
        case("few tokens, sigmoid with correction, shared", f32, 4, 32, 16, 24, 4, num_shared=1, **sigmoid),
        case("few tokens, biases of all, swiglu_oai", f32, 3, 40, 16, 6, 2, **oai),
        case("tiles, biases of all, swiglu_oai", f32, 70, 40, 16, 6, 2, **oai),
        case("few tokens by token id, shared", f32, 4, 32, 16, 8, 3, hashed=True, num_shared=1, **softplus),
        case("few tokens, softmax with correction", f32, 2, 32, 16, 8, 2, biased=True),
        case("few tokens, groups", f32, 3, 32, 16, 16, 3, **grouped),
        case("several tokens", bf16, 9, 64, 32, 12, 3, norm=True),
        case("decode step", bf16, 20, 64, 32, 12, 3, norm=True, num_shared=1),
        case("decode step, router of the inputs' dtype", bf16, 21, 64, 32, 12, 3, norm=True, narrow=True),
        case("decode step, odd sizes", f32, 37, 40, 24, 11, 3),
        case("decode step, groups by their best two", f32, 18, 32, 16, 16, 3, biased=True, group_score="top2",
             score="sigmoid", **grouped),
        case("decode step by token id", f32, 21, 32, 16, 8, 3, hashed=True, **softplus),
        case("more pairs than are ordered with the choice", f32, 257, 16, 16, 6, 4),
        case("batch-invariant", bf16, 11, 40, 24, 6, 3, deterministic=True),
        case("no tokens", f32, 0, 32, 16, 4, 2),
        case("1 token, some experts elsewhere", bf16, 1, 64, 32, 16, 4, norm=True, held=5, first=11),
        case("few tokens, some experts elsewhere", f32, 3, 72, 20, 11, 3, held=6),
        case("decode step, some experts elsewhere", bf16, 20, 64, 32, 12, 3, norm=True, held=4, first=4),
        case("few tokens, biases, some experts elsewhere", f32, 3, 40, 16, 6, 2, held=3, first=3, **oai),
        case("tiles, biases, some experts elsewhere", f32, 70, 40, 16, 6, 2, held=3, first=2, **oai),
        case("more pairs, some experts elsewhere", f32, 131, 16, 16, 9, 8, held=3, first=2),
        *(
            case(f"{t} tokens, 8 of 128 experts of 768", bf16, t, 2048, 768, 128, 8, **qwen) for t in (1, 2, 4, 64)
        ),
        *(case(f"{t} tokens, 6 of 64 experts of 1408 and 2", bf16, t, 2048, 1408, 64, 6, **lite) for t in (1, 4, 64)),
    ]  # fmt: skip
