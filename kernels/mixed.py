"""Inputs that cases of stateful ops share: a mixed batch of sequences over a pool of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class Mixed:
    """Sequences with counts[i] new tokens after contexts[i] − counts[i] known ones; sequences of one token come
    first."""

    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    block_size: int
    query_start: torch.Tensor
    context_len: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor

    @property
    def num_single(self) -> int:
        return sum(count == 1 for count in self.counts)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // self.block_size) for length in self.contexts) + 1

    @property
    def attention(self) -> AttentionBatch:
        return self.keeping(None)

    def keeping(self, tokens: Sequence[int] | None) -> AttentionBatch:
        """With states that stay behind so many tokens of each sequence; None: behind the last."""
        bounds = (self.num_single, max(self.counts), max(self.contexts))
        device = self.query_start.device
        held = None if tokens is None else torch.tensor(tokens, dtype=torch.int32, device=device)
        return AttentionBatch(self.query_start, self.context_len, *bounds, num_kept=held)


def mixed(
    device: torch.device, generator: torch.Generator, seqs: Sequence[tuple[int, int]], block_size: int = 16
) -> Mixed:
    """sequences are (new tokens, tokens in all). Blocks are dealt out in random order and block 0 to nobody."""
    counts, contexts = tuple(count for count, _ in seqs), tuple(length for _, length in seqs)
    needed = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(needed), generator=generator, device=generator.device).cpu() + 1
    table = torch.zeros(len(seqs), max(needed), dtype=torch.int32)
    for i, blocks in enumerate(order.split(needed)):
        table[i, : len(blocks)] = blocks.int()
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.cat([torch.arange(length - count, length) for count, length in seqs])
    seq_of = torch.repeat_interleave(torch.arange(len(seqs)), torch.tensor(counts))
    slots = table[seq_of, positions // block_size].long() * block_size + positions % block_size
    return Mixed(
        counts,
        contexts,
        block_size,
        starts.int().to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        positions.int().to(device),
        table.to(device),
        slots.to(device),
    )


def cos_sin(device: torch.device, length: int, rotary_dim: int, theta: float = 10000.0) -> torch.Tensor:
    """A plain rotary table [length, rotary_dim], cos first."""
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    angles = torch.arange(length, device=device)[:, None] * frequency[None]
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def kept(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    batch: Mixed,
    entries: int,
    dim: int,
    known: Sequence[int],
) -> torch.Tensor:
    """A cache [blocks, entries a block, dim] with the first known[i] entries of each sequence; NaN everywhere else."""
    cache = torch.full((batch.num_blocks, entries, dim), float("nan"), dtype=dtype, device=device)
    for seq, count in enumerate(known):
        drawn = torch.randn(count, dim, generator=generator, device=generator.device).to(device=device, dtype=dtype)
        for first in range(0, count, entries):
            part = drawn[first : first + entries]
            cache[int(batch.block_table[seq, first // entries]), : len(part)] = part
    return cache
