"""Parts of a vocabulary. Words must be equal: logits and ids are copied, and noise is the same bits."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.sample.cases import GREEDY, PLAIN, SEQS, SeqShape
from kernels.sample_candidates.reference import MAX_TOP_K, WORDS
from kernels.testing import EXACT, randn, row_table, rows_of

MOST: SeqShape = (1.0, MAX_TOP_K, 1.0, 0.0)
ALL = [*SEQS, MOST, (1.0, MAX_TOP_K + 1, 1.0, 0.0)]


def case(
    name: str,
    dtype: torch.dtype,
    size: int,
    first: int,
    vocab: int,
    seqs: list[SeqShape],
    ties: bool = False,
    small: bool = True,
) -> Case:
    """`seqs` are (temperature, top_k, top_p, min_p), of which the last two say nothing of candidates. ties: logits are
    rounded so that many are equal, most are −∞, and of the second sequence all."""
    b = len(seqs)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        temperature, top_k, _, _ = zip(*seqs, strict=True)
        logits = randn(generator, device, dtype, b, size, scale=3.0)
        if ties:
            logits = torch.where(logits < 2, float("-inf"), logits.round())
            logits[1] = float("-inf")
        return {
            "logits": logits,
            "rows": rows_of(b, device),
            "temperature": row_table(temperature, torch.float32, device),
            "top_k": row_table(top_k, torch.int32, device),
            "seeds": row_table([i * (2**33 + 1) - 2**35 for i in range(b)], torch.int64, device),
            "positions": torch.arange(b, dtype=torch.int32, device=device) * 1000,
            "first": first,
            "vocab": vocab,
        }

    return Case(name, dtype, make, EXACT, bytes=b * (size * dtype.itemsize + 4 * WORDS), flops=0, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [case(f"C{c} from {first}", dtype, c, first, 9001, ALL) for c, first in ((3, 1022), (123, 0))]
        made.append(case("C5003 from 3998, ties", dtype, 5003, 3998, 9001, ALL, ties=True))
    made.append(case("C2000 from 8191", torch.float32, 2000, 8191, 128256, ALL))
    for seqs, label in ((GREEDY, "greedy"), (PLAIN, "temperature"), (MOST, "top_k")):
        for b in (1, 64, 256):
            name = f"B{b} C64128 from 64128 {label}"
            made.append(case(name, torch.bfloat16, 64128, 64128, 128256, [seqs] * b, small=False))
    return made
