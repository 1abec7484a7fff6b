"""Logits and masks of some of their sequences."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint, randn


def case(name: str, dtype: torch.dtype, seqs: int, masks: int, vocab: int, small: bool = True, first: int = 0) -> Case:
    words = -(-(first + vocab) // 32)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        chosen = torch.randperm(seqs, generator=generator, device=generator.device)[:masks]
        halves = [randint(generator, device, 0, 1 << 16, masks, words, dtype=torch.int64) for _ in range(2)]
        words_of = halves[0] << 16 | halves[1]
        return {
            "logits": randn(generator, device, dtype, seqs, vocab),
            "seqs": chosen.int().to(device),
            "masks": torch.where(words_of >= 1 << 31, words_of - (1 << 32), words_of).int(),
            "first": first,
        }

    moved = masks * (4 * words + vocab * dtype.itemsize // 2)
    return Case(name, dtype, make, EXACT, bytes=moved, flops=0, mutated=("logits",), small=small)


def cases() -> list[Case]:
    made = [case("no tokens", torch.float32, 2, 0, 40)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [case(f"V{vocab}", dtype, 5, 3, vocab) for vocab in (33, 1, 31, 32, 5003)]
    made.append(case("V700 from 333", torch.bfloat16, 5, 3, 700, first=333))
    return [*made, *(case(f"B{n} V151936", torch.float32, n, n, 151936, small=False) for n in (1, 64))]
