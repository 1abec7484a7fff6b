"""Memory that the ranks of one host reach of each other, as ops see it that send through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Programs of a kernel that have flags, and the exchanges of one of them.
MAX_PROGRAMS = 64
STAGES = 2
# A call leaves one half of the memory alone, which a slow rank may still read for the call before.
HALVES = 2
_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of a piece of memory on each of `size` ranks.

    bases    [size] int64   where each rank's piece begins, for this rank's device
    calls    [2] int64      of this rank: calls so far, programs of the one under way that have ended
    pieces   the same memory as tensors [bytes] uint8 by rank
    half     bytes of a half, which has places for what a rank sends and for what it is sent

    A piece begins with flags [STAGES, MAX_PROGRAMS, size] int64: for an exchange and a program the number of the last
    call in which each rank came to it. All bytes are 0 before the first call.
    """

    rank: int
    size: int
    bases: torch.Tensor
    calls: torch.Tensor
    pieces: tuple[torch.Tensor, ...]
    half: int

    @classmethod
    def over(cls, rank: int, pieces: Sequence[torch.Tensor]) -> Peers:
        """Of pieces as `piece_bytes` says, each rank's."""
        device, size = pieces[rank].device, len(pieces)
        bases = torch.tensor([piece.data_ptr() for piece in pieces], dtype=torch.int64, device=device)
        half = (pieces[rank].numel() - flag_bytes(size)) // HALVES
        return cls(rank, size, bases, torch.zeros(2, dtype=torch.int64, device=device), tuple(pieces), half)

    @property
    def capacity(self) -> int:
        """Bytes that one call can add up."""
        return self.half // 2


def flag_bytes(size: int) -> int:
    """Of a piece's flags, rounded up so that what follows is aligned."""
    return -(-STAGES * MAX_PROGRAMS * size * 8 // _ALIGNED) * _ALIGNED


def piece_bytes(size: int, capacity: int) -> int:
    """What each of `size` ranks needs for calls of up to `capacity` bytes."""
    return flag_bytes(size) + HALVES * 2 * (-(-capacity // _ALIGNED) * _ALIGNED)
