"""Sums over ranks of one host by kernels of our own, through memory that they reach of each other.

Where that memory is not to be had (several hosts, GPUs without a way to each other, a CPU) sums stay those of the
library, and the log says why.
"""

from __future__ import annotations

import logging
import os
import secrets
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine import env
from engine.parallel.communicator import Communicator, GroupCommunicator
from engine.types import shown
from kernels.peers import ROW_BYTES, Peers, piece_bytes
from kernels.select import Ops

T = TypeVar("T")

log = logging.getLogger(__name__)

# Bytes of one sum, of two ranks and of more: beyond, the library is taken. So far kernels of ours are ahead between two
# H200 and among four H100 (docs/parallel.md). A rank's piece has four times as much.
MAX_BYTES_OF_TWO, MAX_BYTES = 64 << 20, 16 << 20
# Up to so many bytes that a rank is sent each rank adds everything up by itself: of two H200, and of four H100.
ONE_SHOT_BYTES = 2 << 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class PeerCommunicator(GroupCommunicator):
    """Adds up by `peer_sum` what fits, all else by `library`. held: what must live as long as the peers' memory."""

    def __init__(self, library: GroupCommunicator, peers: Peers, ops: Ops, held: object) -> None:
        super().__init__(library.group, library.store, library.device)
        self._library = library
        self._peers = peers
        self._ops = ops
        self._held = held

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.contiguous().flatten(1) if x.ndim > 1 else x
        if rows.ndim == 1 or not self._fits(rows.nbytes, rows.nbytes // max(1, len(rows))):
            return self._library.all_reduce(x)
        return self._ops.peer_sum(rows, self._peers, self._two_shot(rows))[1].view(x.shape)

    def norms(self, size: int, row: int) -> bool:
        return self._fits(size, row)

    def all_reduce_with_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, h = self._ops.peer_sum(
            x.contiguous(), self._peers, self._two_shot(x), residual.contiguous(), weight, eps=eps, offset=offset
        )
        return h, y

    def exchanges(self, size: int) -> bool:
        return size <= self._peers.slot

    def gather_columns(self, x: torch.Tensor, firsts: torch.Tensor, columns: int) -> torch.Tensor:
        made: torch.Tensor = self._ops.peer_gather(x.contiguous(), self._peers, firsts, columns)
        return made

    def merge_partials(
        self, o: torch.Tensor, lse: torch.Tensor, firsts: torch.Tensor, heads: int, dtype: torch.dtype
    ) -> torch.Tensor:
        made: torch.Tensor = self._ops.peer_merge(o.contiguous(), lse.contiguous(), self._peers, firsts, heads, dtype)
        return made

    def _fits(self, size: int, row: int) -> bool:
        return size <= self._peers.capacity and row <= ROW_BYTES

    def _two_shot(self, x: torch.Tensor) -> bool:
        return x.nbytes * (self.size - 1) > ONE_SHOT_BYTES

    def close(self) -> None:
        super().close()
        self._library.close()
        self._held = None


def reached(
    communicator: Communicator, ops: Ops, device: torch.device, asked: bool, capacity: int | None = None
) -> Communicator:
    """The same ranks over peer memory for sums of up to `capacity` bytes, or `communicator` where there is none, which
    is warned of where it was asked for. All ranks call it. An engine calls it once."""
    if not isinstance(communicator, GroupCommunicator):
        return communicator
    if capacity is None:
        capacity = MAX_BYTES_OF_TWO if communicator.size == 2 else MAX_BYTES
    made, why = None, "kernels over peer memory are for GPUs"
    if device.type == "cuda":
        made, why = pieces_of(communicator, piece_bytes(communicator.size, capacity), device)
    if made is None:
        if communicator.rank == 0:
            level = logging.WARNING if asked else logging.INFO
            log.log(level, "parallel.all_reduce: sums over ranks are those of the library: %s", why)
        return communicator
    return over(communicator, made[0], ops, made[1])


def over(communicator: GroupCommunicator, pieces: Sequence[torch.Tensor], ops: Ops, held: object) -> Communicator:
    """The ranks of `communicator` over pieces that `pieces_of` gave."""
    peers = Peers.over(communicator.rank, pieces)
    return PeerCommunicator(communicator, peers, ops, held)


class _Links:
    """Memory of GPUs that links join, by torch's symmetric memory without multicast."""

    def __init__(self, communicator: GroupCommunicator, name: str, size: int) -> None:
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory
        from torch.distributed import PrefixStore, ProcessGroup

        env.let_ranks_have_one_gpu_each()
        self._size, self._ranks, self._name = size, communicator.size, name
        self._device = torch.device("cuda", torch.cuda.current_device())
        # Ranks find each other by the store of a group with that name, or of what is said of a group before torch 2.10.
        store = PrefixStore(name, communicator.store)
        self._group = ProcessGroup(store, communicator.rank, communicator.size)
        _register_process_group(name, self._group)  # type: ignore[arg-type]
        _SymmetricMemory.set_group_info(name, communicator.rank, communicator.size, store)
        self._own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self._device, name)
        self._meet = _SymmetricMemory.rendezvous
        self._handle: Any = None

    def reach(self) -> list[torch.Tensor]:
        self._handle = self._meet(self._own)
        self._own.zero_()
        torch.cuda.synchronize(self._device)
        return [self._handle.get_buffer(rank, (self._size,), torch.uint8) for rank in range(self._ranks)]

    def close(self) -> None:
        """Mapped memory stays while this is held."""
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)  # type: ignore[arg-type]


class _Files:
    """Memory of processes on a CPU, by files that have no disk."""

    def __init__(self, communicator: GroupCommunicator, name: str, size: int) -> None:
        self._size = size
        self._files = [Path("/dev/shm", f"{name}-{rank}") for rank in range(communicator.size)]
        self._own = self._files[communicator.rank]
        descriptor = os.open(self._own, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def reach(self) -> list[torch.Tensor]:
        return [torch.from_file(str(file), shared=True, size=self._size, dtype=torch.uint8) for file in self._files]

    def close(self) -> None:
        self._own.unlink()


def pieces_of(
    communicator: GroupCommunicator, size: int, device: torch.device
) -> tuple[tuple[list[torch.Tensor], object] | None, str]:
    """`size` bytes of each rank, all 0, as tensors that this one reaches, and what must be held meanwhile; None and
    why on every rank where one of them does not reach all. On a CPU the memory is that of processes of one host."""
    told = communicator.all_gather_numbers([zlib.crc32(_BOOT.read_bytes()), secrets.randbits(62)])
    if len({host for host, _ in told}) > 1:
        return None, "ranks are on several hosts"
    kind, name = _Links if device.type == "cuda" else _Files, f"nereid-peers-{told[0][1]:x}"
    own, why = _agreed(communicator, lambda: kind(communicator, name, size))
    pieces = None
    if own is not None and not why:
        pieces, why = _agreed(communicator, own.reach)
    if own is not None:
        own.close()
    return (None, why) if pieces is None or why else ((pieces, own), "")


def _agreed(communicator: GroupCommunicator, work: Callable[[], T]) -> tuple[T | None, str]:
    """What `work` gives here, or None, and why it fails on any rank, or nothing. All have ended it then."""
    made, why = None, ""
    try:
        made = work()
    except (RuntimeError, OSError, AttributeError) as error:
        why = shown(str(error), 300) or type(error).__name__
    ok = [bool(good) for (good,) in communicator.all_gather_numbers([made is not None])]
    return made, "" if all(ok) else why or f"rank {ok.index(False)} does not reach the others' memory"
