"""Memory that the ranks of one host reach of each other, as ops see it that send through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

# A call leaves the half of the memory alone that a slow rank may still read for the call before.
HALVES = 2
# Places of a half: for the rows that a rank adds up, and for sums that others made.
PLACES = 2
_ALIGNED = 256
# A rank's part of the rows is rounded up to whole ones, which are no longer than this.
ROW_BYTES = 64 << 10
# A head's logarithm travels behind its outputs, as often as 16 and 32 bytes are written at once.
LSE_COPIES = 8


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
        """Bytes that one call can add up whose rows are divided among ranks."""
        return (self.slot - ROW_BYTES) * self.size

    def held(self, at: int, place: int, sender: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What `sender` sends to the rank `at` in the call under way, of that shape: for definitions."""
        half = (int(self.calls[0]) + 1) % HALVES
        begin = ((half * PLACES + place) * self.size + (sender - at) % self.size) * self.slot
        return self.pieces[at][begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def end_call(self) -> None:
        """For definitions: nothing is sent any more."""
        for piece in self.pieces:
            piece.zero_()
        self.calls[0] += 1


def partials_bytes(tokens: int, heads: int, latent: int) -> int:
    """What `peer_merge` sends a rank for tokens of its heads: `latent` outputs in float32, and their logarithm."""
    return tokens * heads * (latent + LSE_COPIES) * 4


def piece_bytes(size: int, capacity: int) -> int:
    """What each of `size` ranks needs for calls of up to `capacity` bytes."""
    held = -(-capacity // size) + ROW_BYTES
    return HALVES * PLACES * size * (-(-held // _ALIGNED) * _ALIGNED)
