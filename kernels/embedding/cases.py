"""Inputs of the embedding gather."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint, randn
from kernels.weight import Dense


def case(name: str, dtype: torch.dtype, t: int, v: int, e: int, scale: float = 1.0, small: bool = True) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        ids = randint(generator, device, 0, v, t)
        table = Dense(randn(generator, device, dtype, v, e))
        return {"ids": ids, "weight": table, "dtype": dtype, "scale": scale}

    moved = t * (4 + 2 * e * dtype.itemsize)
    return Case(name, dtype, make, EXACT, bytes=moved, flops=0 if scale == 1.0 else t * e, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [case(f"T{t} E{e}", dtype, t, 311, e) for t, e in ((1, 64), (3, 2560), (63, 123), (123, 1311))]
        made.append(case("T63 E123 scaled", dtype, 63, 311, 123, scale=123**0.5))
    made.append(case("no tokens", torch.float32, 0, 311, 64))
    made.append(case("T1 Qwen3-4B", torch.bfloat16, 1, 151936, 2560, small=False))
    made.append(case("T8192 Qwen3-4B", torch.bfloat16, 8192, 151936, 2560, small=False))
    return made
