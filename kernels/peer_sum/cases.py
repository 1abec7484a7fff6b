"""Sums of ranks of which one is here, whose memory is all ranks': what it sends comes back to it."""

from __future__ import annotations

from typing import Any

import torch

from kernels.peers import Peers, piece_bytes
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
        x = randn(generator, device, dtype, tokens, width)
        x[:, 1::7] = 0.0
        piece = torch.zeros(piece_bytes(ranks, size * ranks), dtype=torch.uint8, device=device)
        peers = Peers.over(rank, [piece] * ranks)
        peers.calls[0] = CALLS
        return {
            "x": x,
            "peers": peers,
            "two_shot": two_shot,
            "residual": randn(generator, device, dtype, tokens, width) if residual else None,
            "norm_weight": randn(generator, device, dtype, width) if norm else None,
            "eps": 1e-6,
            "offset": 1.0 if norm and residual else 0.0,
        }

    moved = size * (ranks + 2 + residual + norm)
    return Case(name, dtype, make, TOLERANCES[dtype], bytes=moved, flops=ranks * tokens * width, small=small)


def cases() -> list[Case]:
    """Rows go evenly into the ranks where they are shared out, or a share that comes back would be another's."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        made += [
            case("one-shot, N2 T3 E96", dtype, 3, 96, 2, 1),
            case("one-shot, N3 T1 E63, sum alone", dtype, 1, 63, 3, 0, norm=False, residual=False),
            case("two-shot, N2 T6 E96", dtype, 6, 96, 2, 1, two_shot=True),
            case("two-shot, N3 T3 E63, sum alone", dtype, 3, 63, 3, 0, two_shot=True, norm=False, residual=False),
        ]
    made += [
        case("one-shot, N3 T70 E1311, sum alone", torch.float32, 70, 1311, 3, 2, False, False, False),
        case("two-shot, N3 T72 E1311, sum alone", torch.float32, 72, 1311, 3, 2, True, False, False),
        case("one-shot, N5 T67 E48, no residual", torch.float32, 67, 48, 5, 4, False, residual=False),
        case("two-shot, N5 T65 E48, no residual", torch.float32, 65, 48, 5, 4, True, residual=False),
    ]
    for two_shot in (False, True):
        way = "two-shot" if two_shot else "one-shot"
        for tokens in (2, 8, 64, 256):
            for norm in (False, True):
                name = f"{way}, N2 T{tokens} E4096{', norm' if norm else ''}"
                made.append(case(name, torch.bfloat16, tokens, 4096, 2, 0, two_shot, norm, norm, small=False))
    return made
