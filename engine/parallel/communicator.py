"""What ranks say to each other inside a step: sums of partial products, and pieces put together.

A `Communicator` is a value that is handed down where layers are built. That of one rank costs nothing and does nothing.
All ranks call the same methods in the same order, with tensors of equal shapes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from engine.types import shown

# Elements that are gathered at once: bounds the memory of a sum, a rank's float32 sum and all partials.
ORDERED_RUN = 4 << 20


class GroupError(RuntimeError):
    """Ranks that cannot find each other, or do not agree."""


class Communicator:
    """One rank, which has nobody to talk to."""

    rank = 0
    size = 1

    def on_first_rank(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """What the sum over ranks is to hold once: x on the first rank, None on the others."""
        return x if self.rank == 0 else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in x's place. Every rank gets the same bits."""
        return x

    def in_order(self) -> Communicator:
        """The same ranks, whose sums are added in the order of ranks: bits do not depend on a tensor's shape, nor on an
        element's place in it."""
        return self

    def norms(self, size: int, row: int) -> bool:
        """Whether a sum of so many bytes, with so many a row, may have its residual and norm inside."""
        return False

    def all_reduce_with_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h, the sum of all ranks' x and residual, and norm(h) by `weight` [E]; x, residual [T, E]. Where `norms` says
        so."""
        raise NotImplementedError("this rank's sums have no norm inside: ask `norms` first")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, C] of each rank → [size, B, C]."""
        return x[None]

    def exchanges(self, size: int) -> bool:
        """Whether `gather_columns` and `merge_partials` take so many bytes from a rank to another."""
        return False

    def gather_columns(self, x: torch.Tensor, firsts: torch.Tensor, columns: int) -> torch.Tensor:
        """As `peer_gather`. Where `exchanges` says so."""
        raise NotImplementedError("this rank's columns go by `all_gather`: ask `exchanges` first")

    def merge_partials(
        self, o: torch.Tensor, lse: torch.Tensor, firsts: torch.Tensor, heads: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """As `peer_merge`. Where `exchanges` says so."""
        raise NotImplementedError("this rank's parts go by `all_reduce`: ask `exchanges` first")

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Numbers of each rank, by rank. On the host, for the start."""
        return [numbers]

    def close(self) -> None:
        return None


ALONE = Communicator()


class GroupCommunicator(Communicator):
    """One of several ranks, over a process group of torch.distributed: NCCL for GPUs, gloo for CPUs. store: where they
    met."""

    def __init__(self, group: Any, store: Any, device: torch.device) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.group = group
        self.store = store
        self.device = device

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self.group.allreduce([x]).wait()
        return x

    def in_order(self) -> Communicator:
        return self if self.size < 3 else OrderedCommunicator(self.group, self.store, self.device)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        made = x.new_empty(self.size, *x.shape)
        self.group._allgather_base(made.flatten(0, 1), x.contiguous()).wait()
        return made

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        told = torch.tensor([numbers], dtype=torch.int64, device=self.device)
        given: list[list[int]] = self.all_gather(told).flatten(0, 1).tolist()
        return given

    def close(self) -> None:
        self.group = self.store = None


class OrderedCommunicator(GroupCommunicator):
    """Each rank gathers all partials and adds them up by itself, in float32, rounded once: the bits of `peer_sum`. The
    library's order depends on how it cuts a tensor up, from three ranks on."""

    def in_order(self) -> Communicator:
        return self

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.contiguous().view(-1)
        made = torch.empty_like(flat)
        for part, own in zip(made.split(ORDERED_RUN), flat.split(ORDERED_RUN), strict=True):
            first, *others = self.all_gather(own[None]).flatten(1)
            total = first.float()
            for other in others:
                total = total + other.float()
            part.copy_(total)
        return made.view(x.shape)


def connect(
    store: Any, rank: int, size: int, device: torch.device, timeout_s: float, own: str = "127.0.0.1"
) -> Communicator:
    """The communicator of `rank` among `size`, who meet at `store`, a store of torch.distributed.

    timeout_s: a rank that is waited for longer has failed. own: the address by which the others reach this rank over
    gloo; NCCL finds its own. Raises GroupError when the others do not come.
    """
    if size == 1:
        return Communicator()
    from torch import distributed

    patience = timedelta(seconds=timeout_s)
    try:
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = patience
            group: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo: Any = distributed.ProcessGroupGloo
            loose = gloo._Options()
            loose._timeout = patience
            loose._devices = [gloo.create_device(hostname=own)]
            group = gloo(store, rank, size, loose)
        made = GroupCommunicator(group, store, device)
        made.all_gather_numbers([rank])
    except RuntimeError as error:
        raise GroupError(f"rank {rank} of {size} does not find the others: {shown(str(error), 200)}") from None
    return made
