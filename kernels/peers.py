"""Memory that the ranks of one host reach of each other, as ops see it that send through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A call leaves the half of the memory alone that a slow rank may still read for the call before.
HALVES = 2
# Places of a half: for the rows that a rank adds up, and for sums that others made.
PLACES = 2
_ALIGNED = 256
# A share of the rows is rounded up to whole ones, which are no longer than this.
_ROW_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of a piece of memory on each of `size` ranks.

    bases    [size] int64   where each rank's piece begins, for this rank's device
    calls    [2] int64      of this rank: calls so far, programs of the one under way that have ended
    pieces   the same memory as tensors [bytes] uint8 by rank
    slot     bytes of a slot

    A piece is slots [HALVES, PLACES, size]: slot i of a rank is for what the rank i behind it sends, modulo size. All
    bytes are 0 while nothing is sent.
    """

    rank: int
    size: int
    bases: torch.Tensor
    calls: torch.Tensor
    pieces: tuple[torch.Tensor, ...]
    slot: int

    @classmethod
    def over(cls, rank: int, pieces: Sequence[torch.Tensor]) -> Peers:
        """Of pieces as `piece_bytes` says, each rank's."""
        device, size = pieces[rank].device, len(pieces)
        bases = torch.tensor([piece.data_ptr() for piece in pieces], dtype=torch.int64, device=device)
        slot = pieces[rank].numel() // (HALVES * PLACES * size)
        return cls(rank, size, bases, torch.zeros(2, dtype=torch.int64, device=device), tuple(pieces), slot)

    @property
    def capacity(self) -> int:
        """Bytes that one call can add up: whole in a slot for two ranks, else in shares of rows."""
        return self.slot if self.size == 2 else (self.slot - _ROW_BYTES) * self.size


def piece_bytes(size: int, capacity: int) -> int:
    """What each of `size` ranks needs for calls of up to `capacity` bytes."""
    held = capacity if size == 2 else -(-capacity // size) + _ROW_BYTES
    return HALVES * PLACES * size * (-(-held // _ALIGNED) * _ALIGNED)
