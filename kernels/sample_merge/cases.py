"""Candidates of parts. Tokens must be equal: the noise is the same bits, and no case stands on a rounding edge."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.sample.cases import GREEDY, PLAIN, SeqShape
from kernels.sample_candidates.reference import MAX_TOP_K, WORDS, sample_candidates
from kernels.testing import EXACT, randn, row_table, rows_of

TOP: SeqShape = (0.7, 50, 0.9, 0.02)
SEQS = [
    GREEDY,
    PLAIN,
    (0.7, 5, 1.0, 0.0),
    (1.0, 2, 0.8, 0.0),
    (0.6, MAX_TOP_K, 1.0, 0.1),
    TOP,
    (0.0, 7, 0.5, 0.1),
    (2.0, 1, 1.0, 0.0),
    (3.0, 40, 0.0, 0.0),
    (0.9, 10**6, 1.0, 0.0),
]


def case(
    name: str, size: int, parts: int, seqs: list[SeqShape], ties: bool = False, whole: bool = True, small: bool = True
) -> Case:
    """Of a vocabulary of size · parts − 1 tokens. ties: many logits are equal, and most are −∞. whole: parts come from
    logits; else each is drawn by itself, which costs less of large ones."""
    b = len(seqs)
    vocab = size * parts - 1

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        temperature, top_k, top_p, min_p = zip(*seqs, strict=True)
        shared = {
            "rows": rows_of(b, device),
            "temperature": row_table(temperature, torch.float32, device),
            "top_k": row_table(top_k, torch.int32, device),
            "seeds": row_table([i * (2**33 + 1) - 2**35 for i in range(b)], torch.int64, device),
            "positions": torch.arange(b, dtype=torch.int32, device=device) * 1000,
        }
        held = size if whole else 4 * MAX_TOP_K
        logits = randn(generator, device, torch.float32, b, parts * held - 1, scale=3.0)
        if ties:
            logits = torch.where(logits < 2, float("-inf"), logits.round())
            logits[1] = float("-inf")
        made = [
            sample_candidates(part, first=i * size, vocab=vocab, **shared)
            for i, part in enumerate(logits.split(held, dim=1))
        ]
        return {
            "words": torch.stack(made),
            **shared,
            "top_p": row_table(top_p, torch.float32, device),
            "min_p": row_table(min_p, torch.float32, device),
            "vocab": vocab,
        }

    return Case(name, torch.int32, make, EXACT, bytes=4 * parts * b * WORDS, flops=0, small=small)


def cases() -> list[Case]:
    made = [case(f"N{parts} of {size}", size, parts, SEQS) for parts, size in ((1, 100), (2, 62), (3, 2001), (5, 41))]
    made.append(case("N3 of 700, ties", 700, 3, SEQS, ties=True))
    for seqs, label in ((GREEDY, "greedy"), (PLAIN, "temperature"), (TOP, "top_k and top_p")):
        for b in (1, 64, 256):
            made.append(case(f"B{b} N8 of 16032 {label}", 16032, 8, [seqs] * b, whole=False, small=False))
    return made
