"""A cache of latents whose tokens ranks share out, so that it is stored once: what of a step is here, and attention put
together over ranks.

A block of the pool has a run of tokens on each rank, under the same number. All tables, the prefix tree and the
scheduler count such blocks and know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from engine.cache.spec import PoolSpec
from engine.parallel.communicator import Communicator
from engine.runner.batch import OwnTokens
from kernels.peers import partials_bytes


def own_tokens(slots: Sequence[torch.Tensor], positions: torch.Tensor, pool: PoolSpec) -> OwnTokens | None:
    """What this rank keeps of a step's tokens, and reads; None where it keeps all. slots and positions as in
    `DeviceBatch`."""
    if pool.ranks == 1:
        return None
    size, each = pool.block_size, pool.block_share
    own = []
    for places in slots:
        offset = places % size
        here = (places >= 0) & (offset // each == pool.rank)
        own.append(torch.where(here, places // size * each + offset % each, -1))
    read = positions + 1
    context_len = read // size * each + (read % size - pool.rank * each).clamp(0, each)
    return OwnTokens(tuple(own), context_len, pool.ranks, each)


class SharedContext:
    """Attention of `heads` heads of this rank over tokens that are on all."""

    def __init__(self, communicator: Communicator, heads: int, channels: int, device: torch.device) -> None:
        """channels: of a query. All ranks call it, in the same order."""
        self._communicator = communicator
        self._heads = [count for (count,) in communicator.all_gather_numbers([heads])]
        self._own = heads
        self._first = sum(self._heads[: communicator.rank])
        self._firsts = torch.tensor(list(accumulate(self._heads, initial=0)), dtype=torch.int64, device=device)
        self._columns = self._firsts * channels

    def all_heads(self, q: torch.Tensor) -> torch.Tensor:
        """q [T, H, C] of this rank's heads → of all ranks' heads [T, sum of H, C]."""
        tokens, _, channels = q.shape
        most = max(self._heads)
        if self._communicator.exchanges(tokens * most * channels * q.element_size()):
            told = self._communicator.gather_columns(q.flatten(1), self._columns, sum(self._heads) * channels)
            return told.unflatten(1, (-1, channels))
        padded = F.pad(q, (0, 0, 0, most - q.shape[1]))
        told = self._communicator.all_gather(padded.flatten(1)).unflatten(2, (most, channels))
        return torch.cat([part[:, :count] for part, count in zip(told, self._heads, strict=True)], dim=1)

    def own_heads(self, o: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """o [T, sum of H, L] and lse [T, sum of H] float32 over this rank's tokens, as `latent_partials` gives them →
        [T, H, L] in `dtype` over all tokens, of this rank's heads."""
        if self._communicator.exchanges(partials_bytes(len(o), max(self._heads), o.shape[2])):
            return self._communicator.merge_partials(o, lse, self._firsts, self._own, dtype)
        told = self._communicator.all_gather(lse)
        top = told.amax(0)
        weights = torch.exp(told - torch.where(top == float("-inf"), 0.0, top))
        total = weights.sum(0)
        weight = weights[self._communicator.rank] / torch.where(total == 0.0, 1.0, total)
        merged = self._communicator.all_reduce(o * weight[..., None])
        return merged[:, self._first : self._first + self._own].to(dtype)

    def whole_blocks(self, entries: torch.Tensor) -> torch.Tensor:
        """entries [N, block_share, C] of N blocks' tokens that are here → [N · ranks, block_share, C], the runs of a
        block in turn."""
        count, each, channels = entries.shape
        # Bytes, for not all libraries take 8-bit floats.
        told = self._communicator.all_gather(entries.contiguous().view(torch.uint8).flatten(1))
        whole = told.transpose(0, 1).contiguous().view(entries.dtype)
        return whole.view(count * self._communicator.size, each, channels)
