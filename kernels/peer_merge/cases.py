"""Heads of ranks of which one is here, whose memory is all ranks': what it sends comes back to it."""

from __future__ import annotations

from typing import Any

import torch

from kernels.peers import Peers, partials_bytes, piece_bytes
from kernels.registry import Case
from kernels.testing import TOLERANCES, randn


def case(
    name: str,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    latent: int,
    ranks: int,
    rank: int,
    small: bool = True,
) -> Case:
    size = partials_bytes(tokens, heads, latent)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        o = randn(generator, device, torch.float32, tokens, ranks * heads, latent)
        lse = 4 * randn(generator, device, torch.float32, tokens, ranks * heads)
        # Of the first token no rank has an entry, of the next one only some.
        lse[0], o[0] = float("-inf"), 0.0
        lse[-1, ::2] = float("-inf")
        piece = torch.zeros(piece_bytes(ranks, size * ranks), dtype=torch.uint8, device=device)
        firsts = torch.arange(ranks + 1, dtype=torch.int64, device=device) * heads
        peers = Peers.over(rank, [piece] * ranks)
        return {"o": o, "lse": lse, "peers": peers, "firsts": firsts, "heads": heads, "dtype": dtype}

    return Case(name, dtype, make, TOLERANCES[dtype], bytes=size * 3 * ranks, flops=size * ranks, small=small)


def cases() -> list[Case]:
    """The last rank's, for it waits for what programs before its own have sent."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        made += [case("N2 T3 H3 L40", dtype, 3, 3, 40, 2, 1), case("N3 T7 H2 L64", dtype, 7, 2, 64, 3, 2)]
    return [*made, case("N2 T64 H8 L512", torch.bfloat16, 64, 8, 512, 2, 1, small=False)]
