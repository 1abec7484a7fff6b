"""Words to move, and changes of a table."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint


def case(name: str, words: int, changes: int, table: int = 1 << 16, small: bool = True) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        places = torch.randperm(table, generator=generator, device=generator.device)[:changes]
        values = randint(generator, device, -(1 << 31), 1 << 31, changes)
        return {
            "source": randint(generator, device, -(1 << 31), 1 << 31, words),
            "target": torch.zeros(words, dtype=torch.int32, device=device),
            "changes": torch.stack((places.int().to(device), values)),
            "table": randint(generator, device, 0, 1 << 20, table),
        }

    moved = 8 * words + 12 * changes
    return Case(name, torch.int32, make, EXACT, moved, flops=0, mutated=("target", "table"), small=small)


def cases() -> list[Case]:
    made = [
        case("a decode line", 28, 0),
        case("64 decode lines, 4 new blocks", 452, 4),
        case("a prompt that starts", 2075, 1037),
        case("changes alone", 0, 1025),
    ]
    return [*made, case("8 prompts of 1,024 that start", 16459, 8800, small=False)]
