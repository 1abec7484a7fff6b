"""Inputs of sampling. Tokens must be equal: the noise is the same bits, and no case stands on a rounding edge."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randn, row_table, rows_of

SeqShape = tuple[float, int, float, float]
GREEDY: SeqShape = (0.0, 0, 1.0, 0.0)
PLAIN: SeqShape = (1.0, 0, 1.0, 0.0)
ALL: SeqShape = (0.7, 50, 0.9, 0.02)
SEQS = [
    GREEDY,
    (1.3, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (0.6, 0, 1.0, 0.1),
    ALL,
    (0.0, 7, 0.5, 0.1),
    (2.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (0.9, 10**6, 0.99, 0.0),
]


def case(name: str, dtype: torch.dtype, v: int, seqs: list[SeqShape], spread: float = 3.0, small: bool = True) -> Case:
    """`seqs` are (temperature, top_k, top_p, min_p)."""
    b = len(seqs)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        temperature, top_k, top_p, min_p = zip(*seqs, strict=True)
        return {
            "logits": randn(generator, device, dtype, b, v, scale=spread),
            "rows": rows_of(b, device),
            "temperature": row_table(temperature, torch.float32, device),
            "top_k": row_table(top_k, torch.int32, device),
            "top_p": row_table(top_p, torch.float32, device),
            "min_p": row_table(min_p, torch.float32, device),
            "seeds": row_table([i * (2**33 + 1) - 2**35 for i in range(b)], torch.int64, device),
            "positions": torch.arange(b, dtype=torch.int32, device=device) * 1000,
        }

    return Case(name, dtype, make, EXACT, bytes=b * v * dtype.itemsize, flops=0, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [case(f"V{v} every filter", dtype, v, SEQS) for v in (3, 123, 5003)]
    made.append(case("V1311 flat", torch.float32, 1311, SEQS, spread=1e-2))
    for seqs, label in ((GREEDY, "greedy"), (PLAIN, "temperature"), (ALL, "every filter")):
        for b in (1, 64, 256):
            made.append(case(f"B{b} V151936 {label}", torch.float32, 151936, [seqs] * b, small=False))
    nucleus = (1.0, 0, 0.95, 0.0)
    made.append(case("B64 V151936 top_p, peaked", torch.float32, 151936, [nucleus] * 64, spread=6.0, small=False))
    made.append(case("B64 V151936 top_p, flat", torch.float32, 151936, [nucleus] * 64, spread=1.0, small=False))
    made.append(case("B64 V151936 every line", torch.bfloat16, 151936, (SEQS * 7)[:64], small=False))
    return made
