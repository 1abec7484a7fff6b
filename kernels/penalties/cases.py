"""Inputs of penalties."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import TOLERANCES, randint, randn, row_table, rows_of

SeqShape = tuple[int, int, float, float, float]
SEQS: list[SeqShape] = [
    (5, 1500, 1.0, 0.0, 0.0),
    (100, 200, 1.2, 0.0, 0.1),
    (1400, 1450, 1.3, 0.5, 0.0),
    (3, 3, 1.0, 1.0, 0.2),
    (1, 1, 0.8, 0.0, 0.3),
    (1, 9, 1.0, -0.1, 0.0),
    (1, 1025, 1.1, 0.2, -0.1),
]


def case(name: str, dtype: torch.dtype, v: int, seqs: list[SeqShape], small: bool = True, first: int = 0) -> Case:
    """`seqs` are (prompt tokens, tokens, repetition, presence, frequency). Some table entries are no tokens, or beside
    those from `first` on."""
    b = len(seqs)
    longest = max(seq[1] for seq in seqs)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        num_prompt, lengths, repetition, presence, frequency = zip(*seqs, strict=True)
        return {
            "logits": randn(generator, device, dtype, b, v, scale=3.0),
            "token_table": randint(generator, device, -1, 2 * first + v + 1, b + 2, longest),
            "rows": rows_of(b, device),
            "num_prompt": row_table(num_prompt, torch.int32, device),
            "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
            "repetition": row_table(repetition, torch.float32, device),
            "presence": row_table(presence, torch.float32, device),
            "frequency": row_table(frequency, torch.float32, device),
            "first": first,
        }

    changed = [seq for seq in seqs if seq[2:] != (1.0, 0.0, 0.0)]
    moved = 12 * b + sum(seq[1] * 4 + 2 * v * dtype.itemsize for seq in changed)
    return Case(
        name, dtype, make, TOLERANCES[dtype], moved, flops=4 * len(changed) * v, mutated=("logits",), small=small
    )


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [case(f"V{v}", dtype, v, SEQS) for v in (3, 123, 5003)]
    made.append(case("V700 from 333", torch.bfloat16, 700, SEQS, first=333))
    real = [(1024, 1100, 1.1, 0.1, 0.1)]
    for b in (1, 64):
        made.append(case(f"B{b} V151936", torch.float32, 151936, real * b, small=False))
    neutral = [(1024, 1100, 1.0, 0.0, 0.0)]
    made.append(case("B64 V151936 neutral", torch.float32, 151936, neutral * 64, small=False))
    return made
