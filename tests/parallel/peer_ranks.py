"""One of several processes that add up through memory that they share, by kernels under Triton's interpreter.

    python -m tests.parallel.peer_ranks RANK SIZE FOLDER

Plays `CALLS` and writes what it got into FOLDER; then again some of them with a kernel that is broken: it adds up its
own part first, does not take turns with halves of the memory, or does not wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.distributed import FileStore

from engine.parallel.communicator import GroupCommunicator, connect
from engine.parallel.context import SharedContext
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
# Heads of three ranks, of which two take the first two; tokens and channels of a head.
HEADS, TOKENS, CHANNELS = (2, 1, 2), 7, 40
BROKEN = ("own part first", "one half", "no wait")
# Fewer than there are rows, so that a program has several.
PROGRAMS = 3


def own_part_first(p_bases: Any, x: Any, place: Any, slot: Any, at: Any, held: Any, rank: Any, size: Any) -> Any:
    """As `_added`, in another order on each rank."""
    from kernels.peer_sum import kernel

    total = x.to(tl.float32)
    for i in range(1, int(size)):
        p_sent = kernel.slot_of(p_bases, rank, place, (int(rank) + i) % int(size), slot, size, x.dtype)
        total += kernel.arrived(p_sent, at, held, x.dtype).to(tl.float32)
    return total.to(x.dtype)


def arrived(begin: Callable[[], None], seconds: float) -> Callable[..., Any]:
    """As `arrived`, for some seconds at most, behind `begin`."""

    def read(p_sent: Any, at: Any, held: Any, kind: Any) -> Any:
        begin()
        began = time.monotonic()
        bits = tl.load(p_sent + at, mask=held, other=1)
        while (bits.handle.data == 0).any() and time.monotonic() - began < seconds:
            time.sleep(0.001)
            bits = tl.load(p_sent + at, mask=held, other=1)
        tl.store(p_sent + at, tl.zeros_like(bits), mask=held)
        return bits.to(kind, bitcast=True)

    return read


def late(piece: torch.Tensor) -> Callable[[], None]:
    """Waits until the first rank has sent what it adds in the second call."""
    sent = CALLS[1].inputs(1, 0).numpy().tobytes()

    def wait() -> None:
        began = time.monotonic()
        while sent not in piece.numpy().tobytes() and time.monotonic() - began < 2.0:
            time.sleep(0.001)

    return wait


def peer_ops(device: torch.device) -> Any:
    """The kernels over peer memory."""
    workspace = Workspace(device)
    names = ("peer_sum", "peer_gather", "peer_merge")
    return SimpleNamespace(**{name: Op(name).bound(workspace) for name in names})


def play(peers: Any, rank: int, numbers: range, device: torch.device = CPU) -> list[tuple[torch.Tensor, ...]]:
    given = []
    for number in numbers:
        call = CALLS[number]
        if call.late == rank:
            time.sleep(0.05)
        x = call.inputs(number, rank).to(device)
        residual, weight = (tensor.to(device) for tensor in call.around(number))
        peers._two_shot = lambda x, way=call.two_shot: way
        normed = call.normed and peers.norms(x.nbytes, x[0].nbytes)
        given.append(peers.all_reduce_with_norm(x, residual, weight, EPS, 1.0) if normed else (peers.all_reduce(x),))
    return given


def queries(size: int) -> torch.Tensor:
    """[T, all heads, C] of all ranks' heads."""
    return torch.randn(TOKENS, sum(HEADS[:size]), CHANNELS, generator=torch.Generator().manual_seed(5))


def partials(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank's tokens give all heads: o [T, all heads, C] and lse [T, all heads]. Of the first token's heads
    nobody has a token, of the second's only the first rank."""
    generator = torch.Generator().manual_seed(50 + rank)
    o = torch.randn(TOKENS, sum(HEADS[:size]), CHANNELS, generator=generator)
    lse = torch.randn(TOKENS, sum(HEADS[:size]), generator=generator) * 4
    lse[: 1 if rank == 0 else 2], o[: 1 if rank == 0 else 2] = float("-inf"), 0.0
    return o, lse


def exchange(peers: Any, rank: int, size: int, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of all heads, and attention of this rank's heads over the tokens of all."""
    context = SharedContext(peers, HEADS[rank], CHANNELS, device)
    first = sum(HEADS[:rank])
    own = queries(size)[:, first : first + HEADS[rank]].contiguous().to(device)
    o, lse = (tensor.to(device) for tensor in partials(rank, size))
    assert peers.exchanges(o.nbytes)
    return context.all_heads(own), context.own_heads(o, lse, torch.float32)


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    communicator = connect(FileStore(str(folder / "store"), size), rank, size, CPU, PATIENCE_S)
    assert isinstance(communicator, GroupCommunicator)
    made, why = pieces_of(communicator, piece_bytes(size, CAPACITY), CPU)
    assert made is not None, why
    peers: Any = over(communicator, made[0], peer_ops(CPU), made[1])
    from kernels.peer_sum import kernel

    with pytest.MonkeyPatch.context() as patch, interpreter.language_bound_once():
        interpreter.complete_casts(patch)
        patch.setattr(kernel, "MAX_PROGRAMS", PROGRAMS)
        given = {"": play(peers, rank, range(len(CALLS)))}
        # One too large for peers goes by the library.
        given[""].append((peers.all_reduce(torch.full((2, CAPACITY), float(rank + 1))),))
        given["exchanged"] = [exchange(peers, rank, size) for _ in range(3)]
        communicator.all_gather_numbers([rank])
        with pytest.MonkeyPatch.context() as wrong:
            wrong.setattr(kernel, "_added", own_part_first)
            given[BROKEN[0]] = play(peers, rank, range(4))
        for name in ("read late", BROKEN[1]):
            communicator.all_gather_numbers([rank])
            with pytest.MonkeyPatch.context() as wrong:
                begin = late(made[0][rank]) if rank == 1 else lambda: None
                wrong.setattr(kernel, "arrived", arrived(begin, PATIENCE_S if name not in BROKEN else 2.0))
                if name in BROKEN:
                    wrong.setattr(kernel, "PLACES", 0)
                given[name] = play(peers, rank, range(2))
        communicator.all_gather_numbers([rank])
        with pytest.MonkeyPatch.context() as wrong:
            wrong.setattr(kernel, "arrived", arrived(lambda: None, 0.0))
            # The first rank has ended before the others begin.
            if rank:
                communicator.all_gather_numbers([rank])
            given[BROKEN[2]] = play(peers, rank, range(4))
            if not rank:
                communicator.all_gather_numbers([rank])
    torch.save(given, folder / f"{rank}.pt")
    communicator.all_gather_numbers([rank])


if __name__ == "__main__":
    main()
