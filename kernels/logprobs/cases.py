"""Inputs of log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randint, randn


def case(
    name: str, dtype: torch.dtype, b: int, v: int, k: int, banned: int = 0, ties: bool = False, small: bool = True
) -> Case:
    """`banned` tokens have a logit of −∞; `ties` rounds the logits so that many are equal."""

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        logits = randn(generator, device, dtype, b, v, scale=3.0)
        if ties:
            logits = logits.round()
        logits[:, :banned] = float("-inf")
        return {"logits": logits, "tokens": randint(generator, device, banned, v, b, dtype=torch.int64), "k": k}

    moved = b * v * dtype.itemsize
    return Case(name, dtype, make, TOLERANCES[torch.float32], bytes=moved, flops=3 * b * v, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [
            case("B1 V3 k3", dtype, 1, 3, 3),
            case("B3 V123 k5, ties", dtype, 3, 123, 5, ties=True),
            case("B2 V123 k20, ten left", dtype, 2, 123, 20, banned=113),
            case("B2 V5003 k0", dtype, 2, 5003, 0),
            case("B2 V9001 k20, ties", dtype, 2, 9001, 20, ties=True),
        ]
    for b in (1, 64):
        for k in (0, 20):
            made.append(case(f"B{b} V151936 k{k}", torch.float32, b, 151936, k, small=False))
    return made
