"""Entries that draft, and how many passes there are."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint


def case(name: str, entries: int, depth: int, small: bool = True) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        counts = randint(generator, device, 0, depth + 1, entries)
        return {
            "lengths": counts + randint(generator, device, 1, 500, entries),
            "counts": counts,
            "rows": randint(generator, device, 0, 1 << 12, entries),
            "depth": depth,
            "dummy": 1 << 12,
        }

    moved = entries * (12 + 16 * depth)
    return Case(name, torch.int32, make, EXACT, moved, 0, small=small)


def cases() -> list[Case]:
    made = [case("no tokens", 0, 4), case("1 entry", 1, 1), case("37 entries", 37, 3), case("259 entries", 259, 16)]
    return [*made, *(case(f"{n} entries, 8 passes", n, 8, small=False) for n in (1, 64))]
