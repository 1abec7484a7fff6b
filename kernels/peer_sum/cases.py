"""Sums of ranks of which one is here: the others have come to all that it waits for, and sent what they send."""

from __future__ import annotations

from typing import Any

import torch

from kernels.peers import MAX_PROGRAMS, STAGES, Peers, flag_bytes, piece_bytes
from kernels.registry import Case
from kernels.testing import TOLERANCES, randn

CALLS = 6  # before the one of the case


def case(
    name: str,
    dtype: torch.dtype,
    tokens: int,
    width: int,
    ranks: int,
    rank: int,
    two_shot: bool = False,
    norm: bool = True,
    residual: bool = True,
    small: bool = True,
) -> Case:
    size = tokens * width * dtype.itemsize

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        parts = [randn(generator, device, dtype, tokens, width) for _ in range(ranks)]
        total = torch.stack(parts).float().sum(0) if ranks == 2 else _in_order(parts)
        pieces = []
        for part in parts:
            piece = torch.zeros(piece_bytes(ranks, size), dtype=torch.uint8, device=device)
            half = (piece.numel() - flag_bytes(ranks)) // 2
            place = flag_bytes(ranks) + (CALLS + 1) % 2 * half
            if part is not parts[rank]:
                piece[place : place + size] = part.flatten().view(torch.uint8)
            # Rows that others add up; the rank's own are written over.
            place += half // 2
            piece[place : place + size] = total.to(dtype).flatten().view(torch.uint8)
            pieces.append(piece)
        flags = pieces[rank][: STAGES * MAX_PROGRAMS * ranks * 8].view(torch.int64).view(-1, ranks)
        # In all calls to come: a benchmark makes many.
        flags[:] = 1 << 40
        flags[:, rank] = CALLS
        peers = Peers.over(rank, pieces)
        peers.calls[0] = CALLS
        return {
            "x": parts[rank],
            "peers": peers,
            "two_shot": two_shot,
            "residual": randn(generator, device, dtype, tokens, width) if residual else None,
            "norm_weight": randn(generator, device, dtype, width) if norm else None,
            "eps": 1e-6,
            "offset": 1.0 if norm and residual else 0.0,
        }

    moved = size * (ranks + 2 + residual + norm)
    return Case(name, dtype, make, TOLERANCES[dtype], bytes=moved, flops=ranks * tokens * width, small=small)


def _in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        for two_shot in (False, True):
            way = "two-shot" if two_shot else "one-shot"
            made += [
                case(f"{way}, N2 T3 E96", dtype, 3, 96, 2, 1, two_shot),
                case(f"{way}, N3 T1 E63, sum alone", dtype, 1, 63, 3, 0, two_shot, norm=False, residual=False),
            ]
    for two_shot in (False, True):
        way = "two-shot" if two_shot else "one-shot"
        made += [
            case(f"{way}, N3 T70 E1311, sum alone", torch.float32, 70, 1311, 3, 2, two_shot, False, False),
            case(f"{way}, N5 T67 E48, no residual", torch.float32, 67, 48, 5, 4, two_shot, residual=False),
        ]
        for tokens in (1, 8, 64, 256):
            for norm in (False, True):
                name = f"{way}, N2 T{tokens} E4096{', norm' if norm else ''}"
                made.append(case(name, torch.bfloat16, tokens, 4096, 2, 0, two_shot, norm, norm, small=False))
    return made
