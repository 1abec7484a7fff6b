"""Proposals of entries, and rows that end before, among and behind what was counted on."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint


def case(name: str, entries: int, most: int = 4, longest: int = 63, small: bool = True) -> Case:
    """Of up to `most` drafts an entry; twice as many are proposed at most."""

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        order = torch.randperm(entries + 3, generator=generator, device=generator.device)[:entries]
        counts = randint(generator, device, 0, most + 1, entries)
        lengths = randint(generator, device, most + 1, longest + 1, entries)
        return {
            "proposed": randint(generator, device, 0, 1 << 20, entries, 2 * most),
            "starts": (lengths - counts - randint(generator, device, -1, most, entries)).clamp(min=0),
            "sizes": randint(generator, device, 0, 2 * most + 1, entries),
            "counts": counts,
            "lengths": lengths,
            "rows": order.int().to(device),
            "tokens": randint(generator, device, 0, 1 << 20, entries + 3, longest + 1),
        }

    moved = entries * (20 + 8 * most)
    return Case(name, torch.int32, make, EXACT, moved, 0, mutated=("tokens",), small=small)


def cases() -> list[Case]:
    made = [case("no tokens", 0), case("37 entries", 37), case("1 entry", 1, most=1), case("up to 16", 5, most=16)]
    return [*made, *(case(f"{n} entries, 20,480 tokens at most", n, 8, 20480, small=False) for n in (1, 64))]
