"""Steps whose drafts stand, differ and are followed by no token."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint


def case(name: str, drafts: list[int], depth: int, small: bool = True) -> Case:
    """`drafts` of each entry; nothing is drawn behind one token in nine, and half of the drafts equal their draw."""
    entries, total = len(drafts), len(drafts) + sum(drafts)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        counts = torch.tensor(drafts, dtype=torch.int32).to(device)
        drawn = randint(generator, device, -1, 8, total)
        stands = randint(generator, device, 0, 4, total) > 0
        before = torch.cat((drawn[-1:], drawn[:-1]))
        order = torch.randperm(entries + 3, generator=generator, device=generator.device)[:entries]
        return {
            "drawn": drawn,
            "ids": torch.where(stands, before, randint(generator, device, 0, 8, total)),
            "last": ((1 + counts).cumsum(0) - 1).int(),
            "counts": counts,
            "lengths": counts + randint(generator, device, 1, 500, entries),
            "out_rows": order.int().to(device),
            "row_lengths": randint(generator, device, 0, 500, entries + 3),
            "depth": depth,
        }

    moved = 28 * entries + 8 * total
    return Case(name, torch.int32, make, EXACT, moved, 0, mutated=("row_lengths",), small=small)


def cases() -> list[Case]:
    made = [
        case("no tokens", [], 4),
        case("one token", [0], 1),
        case("one draft", [1], 1),
        case("entries of 0 to 5", [0, 0, 3, 5, 1, 0, 2, 5, 4] * 7, 5),
        case("up to 16", [16, 3, 16, 15, 0, 16], 16),
    ]
    return [*made, *(case(f"{n} entries of 1 + 3", [3] * n, 3, small=False) for n in (1, 64, 256))]
