"""Cases of expert routing."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case, Tolerance
from kernels.testing import randint, randn

# Weights are compared as numbers and experts exactly: logits are drawn apart, so that rounding never swaps two.
TOLERANCE = Tolerance(max_rel=1e-5, rms=5e-6)


def _case(name: str, t: int, e: int, k: int, small: bool = True, hashed: bool = False, **options: Any) -> Case:
    biased = options.pop("biased", False)

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        order = torch.rand(t, e, generator=g, device=g.device).argsort(dim=-1).float()
        made: dict[str, Any] = {"logits": (order / e * 6 - 3).to(device), "top_k": k, **options}
        if biased:
            made["bias"] = randn(g, device, torch.float32, e, scale=0.2)
        if hashed:
            table = torch.rand(50, e, generator=g, device=g.device).argsort(dim=-1)[:, :k]
            made["table"] = table.int().to(device)
            made["token_ids"] = randint(g, device, 0, 50, t)
        return made

    return Case(name, torch.float32, make, TOLERANCE, bytes=t * (e * 4 + k * 8), flops=t * e * (4 + k), small=small)


def cases() -> list[Case]:
    return [
        _case("softmax, 128 experts, 8 of them", 5, 128, 8),
        _case("softmax, not renormalised, odd count", 3, 60, 6, renormalize=False),
        _case("softmax, groups by their best", 4, 64, 6, num_groups=8, top_groups=3, renormalize=False, scale=16.0),
        _case("sigmoid with correction", 4, 384, 8, score="sigmoid", biased=True, scale=2.827),
        _case(
            "sigmoid with correction, groups by their best two",
            4,
            32,
            4,
            score="sigmoid",
            biased=True,
            num_groups=4,
            top_groups=2,
            group_score="top2",
        ),
        _case("root of softplus with correction", 4, 256, 6, score="sqrtsoftplus", biased=True, scale=1.5),
        _case("root of softplus by token id", 7, 16, 3, score="sqrtsoftplus", hashed=True, scale=1.5),
        _case("no tokens", 0, 16, 2),
        _case("8192 tokens, 128 experts", 8192, 128, 8, small=False),
        _case("64 tokens, 384 experts", 64, 384, 8, small=False, score="sigmoid", biased=True, scale=2.827),
    ]
