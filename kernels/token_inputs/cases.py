"""Inputs of the gathering of a step's tokens."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint


def case(name: str, counts: list[int], longest: int, block_size: int = 16, small: bool = True) -> Case:
    """`counts` are tokens a sequence, its last ones; rows of the tables hold `longest` tokens."""
    entries, total = -(-longest // block_size), sum(counts)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        num_rows = len(counts) + 2
        arena = randint(generator, device, 0, 1 << 20, num_rows * (longest + 1 + entries))
        order = torch.randperm(num_rows, generator=generator, device=generator.device)[: len(counts)]
        first = [(7 * i) % (longest - count + 1) for i, count in enumerate(counts)]
        runs = [torch.arange(a, a + count) for a, count in zip(first, counts, strict=True)]
        count = torch.tensor(counts, dtype=torch.int64)
        return {
            "tokens": arena[: num_rows * (longest + 1)].view(num_rows, longest + 1),
            "blocks": arena[num_rows * (longest + 1) :].view(num_rows, entries),
            "rows": order.int().to(device),
            "seqs": torch.repeat_interleave(torch.arange(len(counts)), count).int().to(device),
            "positions": (torch.cat(runs) if runs else torch.zeros(0)).int().to(device),
            "block_size": block_size,
        }

    return Case(
        name,
        torch.int32,
        make,
        EXACT,
        bytes=28 * total + len(counts) * (8 * entries + 4),
        flops=0,
        small=small,
    )


def cases() -> list[Case]:
    made = [
        case("one token", [1], 63),
        case("decode lines and prompts", [1, 1, 1, 40, 3, 123], 200),
        case("blocks of 64, tables of 1311 entries", [1, 700], 1311 * 64, block_size=64),
    ]
    for seqs in (1, 64, 256):
        made.append(case(f"{seqs} decode lines, 20,480 tokens at most", [1] * seqs, 20480, small=False))
    made.append(case("8 prompts of 1,024, 20,480 tokens at most", [1024] * 8, 20480, small=False))
    return made
