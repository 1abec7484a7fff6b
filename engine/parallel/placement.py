"""Where a model's ranks are: on this host alone, or on the hosts on which a launcher has started a process each."""

from __future__ import annotations

from dataclasses import dataclass

from engine.env import Launched
from engine.types import shown

LOOPBACK = "127.0.0.1"
# torchrun's own, where a launcher names none.
DEFAULT_PORT = 29500
MAX_HOSTS = 64


class PlacementError(ValueError):
    """What a launcher says makes no sense, or does not go with the model's settings; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Placement:
    """This process among those of a launcher, each of which holds as many ranks as the others.

    host: its number, below `hosts`; number 0 runs the engine. A launcher that starts a process a GPU has as many
    "hosts" as GPUs. local: its number among the processes of its machine.
    address, port: where number 0 is.
    """

    host: int = 0
    hosts: int = 1
    local: int = 0
    address: str = LOOPBACK
    port: int = 0

    def ranks(self, tensor: int, host: int | None = None) -> range:
        """The ranks of `host`, which is this one unless it is given. Raises PlacementError when they do not go into
        the hosts."""
        if tensor % self.hosts:
            raise PlacementError(
                f"WORLD_SIZE is {self.hosts} and parallel.tensor {tensor}: ranks are shared out evenly among the "
                f"processes of a launcher, so set parallel.tensor to {self.hosts} or a multiple of it, or start "
                "another number of processes (with WORLD_SIZE 1 all ranks are on this host)"
            )
        each, host = tensor // self.hosts, self.host if host is None else host
        return range(host * each, (host + 1) * each)


ALONE = Placement()


def placed(launched: Launched | None) -> Placement:
    """Raises PlacementError for what is missing or makes no sense."""
    if launched is None:
        return ALONE
    if launched.world_size is None:
        _check_alone(launched)
        return ALONE
    hosts = _number("WORLD_SIZE", launched.world_size, 1, MAX_HOSTS)
    if hosts == 1:
        return ALONE
    if launched.master_addr is None:
        raise PlacementError(
            f"WORLD_SIZE is {hosts} and MASTER_ADDR is not set: give every process the address of the host with RANK 0 "
            "(torchrun and LeaderWorkerSet set it), or set WORLD_SIZE to 1 to have all ranks on this host"
        )
    try:
        launched.master_addr.encode("idna")
    except UnicodeError:
        raise PlacementError(
            f"MASTER_ADDR is {shown(launched.master_addr)!r}: it is no address and no name of a host"
        ) from None
    if launched.rank is None:
        raise PlacementError(
            f"WORLD_SIZE is {hosts} and RANK is not set: give each process its number, 0 to {hosts - 1}"
        )
    host = _number("RANK", launched.rank, 0, hosts - 1)
    size = _number("LOCAL_WORLD_SIZE", launched.local_world_size or "1", 1, hosts)
    local = _number("LOCAL_RANK", launched.local_rank or "0", 0, size - 1)
    if host == 0 and local != 0:
        raise PlacementError(f"RANK is 0 and LOCAL_RANK {local}: the first process of all is the first of its host")
    port = _number("MASTER_PORT", launched.master_port or str(DEFAULT_PORT), 1, 65534)
    # torchrun listens at MASTER_PORT itself.
    return Placement(host, hosts, local, launched.master_addr, port + launched.own_store)


def _check_alone(launched: Launched) -> None:
    """Raises PlacementError where a process that nobody told of others has another number than the first of them: each
    of several such processes would serve the whole model."""
    for name, text in (("RANK", launched.rank), ("LOCAL_RANK", launched.local_rank)):
        if text not in (None, "0"):
            raise PlacementError(
                f"{name} is {shown(text)!r} and WORLD_SIZE is not set: set WORLD_SIZE to the number of processes that "
                "share the model, as torchrun does, or to 1 to have all ranks on this host"
            )


def _number(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise PlacementError(f"{name} is {shown(text)!r}: it must be a number from {low} to {high}")
    return int(text)
