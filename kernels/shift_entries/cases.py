"""Entries of a step and the true lengths of their rows."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint


def case(name: str, queries: list[int], drafts: bool = True, small: bool = True) -> Case:
    """`queries` are tokens an entry, of which all but one may be drafts."""
    entries, total = len(queries), sum(queries)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        order = torch.randperm(entries + 2, generator=generator, device=generator.device)[:entries]
        count = torch.tensor(queries, dtype=torch.int32)
        start = torch.cat((torch.zeros(1, dtype=torch.int32), count.cumsum(0))).int().to(device)
        rows, dummy = order.int().to(device), entries + 2
        draws = randint(generator, device, 0, 4, entries) > 0
        row_lengths = randint(generator, device, 20, 60, entries + 3)
        ahead = randint(generator, device, 0, 5, entries)
        counts = (count.to(device) - 1).clamp(max=4)
        lengths = row_lengths[rows] + ahead + (counts if drafts else 0)
        entry = torch.arange(entries, device=device).repeat_interleave(count.to(device).long())
        within = torch.arange(total, dtype=torch.int32, device=device) - start[entry]
        return {
            "lengths": lengths,
            "positions": (lengths - count.to(device))[entry] + within,
            "rows": rows,
            "out_rows": torch.where(draws, rows, dummy),
            "query_start": start,
            "counts": counts if drafts else None,
            "row_lengths": row_lengths,
            "dummy": dummy,
        }

    moved = 28 * entries + 8 * total
    return Case(name, torch.int32, make, EXACT, moved, 0, mutated=("lengths", "positions"), small=small)


def cases() -> list[Case]:
    made = [
        case("no tokens", []),
        case("one token", [1], drafts=False),
        case("drafts beside single tokens", [1, 1, 4, 2, 5, 1, 3]),
        case("an empty entry, and a prompt of 311", [1, 0, 4, 311]),
    ]
    return [*made, *(case(f"{n} entries of 4", [4] * n, small=False) for n in (1, 64, 256))]
