"""One of several processes that add up through memory that they share, by kernels under Triton's interpreter.

    python -m tests.parallel.peer_ranks RANK SIZE FOLDER

Plays `CALLS` and writes what it got into FOLDER; then again some of them with a kernel that is broken: it adds up its
own part first, or does not wait.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from engine.parallel.communicator import GroupCommunicator, connect
from engine.parallel.peers import over, pieces_of
from kernels.peers import piece_bytes
from kernels.registry import Op
from kernels.workspace import Workspace
from tests.kernels import interpreter

CPU = torch.device("cpu")
CAPACITY = 40_000
PATIENCE_S = 60.0
EPS = 1e-6


@dataclass(frozen=True)
class Call:
    """late: the rank that comes some time after the others. normed: with residual and norm."""

    tokens: int
    width: int
    dtype: torch.dtype
    two_shot: bool
    normed: bool = False
    late: int | None = None

    def inputs(self, number: int, rank: int) -> torch.Tensor:
        """What a rank adds, in call `number`."""
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randn(self.tokens, self.width, generator=generator).to(self.dtype)

    def around(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual and norm weight, the same on all ranks."""
        generator = torch.Generator().manual_seed(1000 * number + 999)
        residual = torch.randn(self.tokens, self.width, generator=generator).to(self.dtype)
        return residual, torch.randn(self.width, generator=generator).to(self.dtype)


CALLS = [
    Call(1, 64, torch.float32, False),
    Call(1, 64, torch.float32, False, late=1),
    Call(3, 77, torch.float32, True, late=0),
    Call(5, 33, torch.bfloat16, False, normed=True, late=1),
    Call(5, 33, torch.bfloat16, True, normed=True, late=0),
    Call(1, 50, torch.float32, True, normed=True),
    Call(67, 100, torch.float32, False, late=1),
    Call(97, 100, torch.float32, True, late=1),
    Call(9, 40, torch.float32, False, normed=True),
    Call(19, 40, torch.float32, True, normed=True, late=0),
    *(Call(2, 40, torch.float32, i % 3 == 0, normed=i % 2 == 0) for i in range(12)),
]
BROKEN = ("own part first", "no wait")
# Fewer than there are rows, so that a program has several.
PROGRAMS = 3


def own_part_first(rank: int) -> Any:
    import triton.language as tl

    def added(p_bases: Any, kind: Any, place: Any, at: Any, held: Any, size: Any, block: Any) -> Any:
        total = tl.zeros([block], dtype=tl.float32)
        for other in range(int(size)):
            sent = (tl.load(p_bases + (rank + other) % int(size)) + place).to(kind)
            total += tl.load(sent + at, mask=held, other=0.0).to(tl.float32)
        return total.to(kind.element_ty)

    return added


def play(peers: Any, rank: int, numbers: range) -> list[tuple[torch.Tensor, ...]]:
    given = []
    for number in numbers:
        call = CALLS[number]
        if call.late == rank:
            time.sleep(0.15)
        x = call.inputs(number, rank)
        residual, weight = call.around(number)
        peers._two_shot = lambda x, way=call.two_shot: way
        normed = call.normed and peers.norms(x.nbytes)
        given.append(peers.all_reduce_with_norm(x, residual, weight, EPS, 1.0) if normed else (peers.all_reduce(x),))
    return given


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    communicator = connect(FileStore(str(folder / "store"), size), rank, size, CPU, PATIENCE_S)
    assert isinstance(communicator, GroupCommunicator)
    made, why = pieces_of(communicator, piece_bytes(size, CAPACITY), CPU)
    assert made is not None, why
    peers: Any = over(communicator, made[0], Op("peer_sum").bound(Workspace(CPU)), made[1])
    from kernels.peer_sum import kernel

    with pytest.MonkeyPatch.context() as patch, interpreter.language_bound_once():
        interpreter.complete_casts(patch)
        patch.setattr(kernel, "MOST", PROGRAMS)
        given = {"": play(peers, rank, range(len(CALLS)))}
        # One too large for peers goes by the library.
        given[""].append((peers.all_reduce(torch.full((2, CAPACITY), float(rank + 1))),))
        for name, of, change in zip(BROKEN, ("_added", "_wait"), (own_part_first(rank), lambda *_: None), strict=True):
            communicator.all_gather_numbers([rank])
            with pytest.MonkeyPatch.context() as wrong:
                wrong.setattr(kernel, of, change)
                given[name] = play(peers, rank, range(4))
    torch.save(given, folder / f"{rank}.pt")
    communicator.all_gather_numbers([rank])


if __name__ == "__main__":
    main()
