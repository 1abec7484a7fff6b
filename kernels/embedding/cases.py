"""Inputs of the embedding gather."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels.linear.gguf_cases import gguf_weight
from kernels.registry import Case
from kernels.testing import EXACT, TOLERANCES, randint, randn
from kernels.weight import Dense


def case(name: str, dtype: torch.dtype, t: int, v: int, e: int, scale: float = 1.0, small: bool = True) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        ids = randint(generator, device, 0, v, t)
        table = Dense(randn(generator, device, dtype, v, e))
        return {"ids": ids, "weight": table, "dtype": dtype, "scale": scale}

    moved = t * (4 + 2 * e * dtype.itemsize)
    return Case(name, dtype, make, EXACT, bytes=moved, flops=0 if scale == 1.0 else t * e, small=small)


def gguf_case(name: str, dtype: torch.dtype, t: int, v: int, e: int, form: str, scale: float = 1.0) -> Case:
    plain = case(name, dtype, t, v, e, scale)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {**plain.make(device, generator), "weight": gguf_weight(generator, device, (v, e), {form: v})}

    return replace(plain, make=make, tolerance=TOLERANCES[dtype])


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [case(f"T{t} E{e}", dtype, t, 311, e) for t, e in ((1, 64), (3, 2560), (63, 123), (123, 1311))]
        made.append(case("T63 E123 scaled", dtype, 63, 311, 123, scale=123**0.5))
    made += [
        gguf_case("T17 E288 Q8_0 blocks, scaled", torch.bfloat16, 17, 311, 288, "Q8_0", scale=288**0.5),
        gguf_case("T3 E768 Q6_K blocks", torch.float32, 3, 311, 768, "Q6_K"),
        gguf_case("no tokens of Q4_K blocks", torch.float16, 0, 31, 256, "Q4_K"),
    ]
    made.append(case("no tokens", torch.float32, 0, 311, 64))
    made.append(case("T1 Qwen3-4B", torch.bfloat16, 1, 151936, 2560, small=False))
    made.append(case("T8192 Qwen3-4B", torch.bfloat16, 8192, 151936, 2560, small=False))
    return made
