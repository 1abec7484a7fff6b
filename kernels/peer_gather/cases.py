"""Columns of ranks of which one is here, whose memory is all ranks': what it sends comes back to it."""

from __future__ import annotations

from typing import Any

import torch

from kernels.peers import Peers, piece_bytes
from kernels.registry import Case, Tolerance
from kernels.testing import randn

EXACT = Tolerance(0.0, 0.0)


def case(name: str, dtype: torch.dtype, tokens: int, width: int, ranks: int, rank: int, small: bool = True) -> Case:
    size = tokens * width * dtype.itemsize

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        x = randn(generator, device, dtype, tokens, width)
        x[:, 1::7] = 0.0
        piece = torch.zeros(piece_bytes(ranks, size * ranks), dtype=torch.uint8, device=device)
        firsts = torch.arange(ranks + 1, dtype=torch.int64, device=device) * width
        return {"x": x, "peers": Peers.over(rank, [piece] * ranks), "firsts": firsts, "columns": ranks * width}

    return Case(name, dtype, make, EXACT, bytes=size * 2 * ranks, flops=0, small=small)


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        made += [case("N2 T3 C77", dtype, 3, 77, 2, 1), case("N3 T70 C100", dtype, 70, 100, 3, 0)]
    return [*made, case("N2 T64 C4608", torch.bfloat16, 64, 4608, 2, 0, small=False)]
