"""Drawn tokens and places for them."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.testing import EXACT, randint


def case(name: str, seqs: int, longest: int = 63, small: bool = True) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows = torch.randperm(seqs + 3, generator=generator, device=generator.device)[:seqs]
        return {
            "drawn": randint(generator, device, -1, 5, seqs, dtype=torch.int64),
            "tokens": randint(generator, device, 0, 1 << 20, seqs + 3, longest),
            "rows": rows.int().to(device),
            "lengths": randint(generator, device, 0, longest, seqs),
        }

    return Case(name, torch.int32, make, EXACT, bytes=24 * seqs, flops=0, mutated=("tokens",), small=small)


def cases() -> list[Case]:
    made = [case("no tokens", 0), case("1 line", 1), case("37 lines", 37), case("259 lines", 259)]
    return [*made, *(case(f"{n} lines, 20,480 tokens at most", n, 20481, small=False) for n in (1, 256))]
