"""What decoder and sampler see of a step: device tensors with their shapes. Built by `inputs`, read by layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Of a step whose cached tokens ranks share out, what is this rank's.

    slots        one [T] int64 a KV group: as in the batch, by the tokens of a block that are here; -1 for a token that
                 another rank keeps
    context_len  [T] int32    how many of the tokens that each token reads are here: the first ones of its blocks' runs
    ranks, block_share        ranks, and tokens of a block that each has
    """

    slots: tuple[torch.Tensor, ...]
    context_len: torch.Tensor
    ranks: int
    block_share: int


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """T tokens in B entries. Entries with one token come first; `num_single` of them.

    token_ids    [T] int32    inputs
    positions    [T] int32    place of each token in its request
    entries      [T] int32    entry of each token
    query_start  [B+1] int32  entry i owns tokens query_start[i] … query_start[i+1]
    context_len  [B] int32    tokens in the cache for the entry once this step has written its own
    block_tables one [B, M] int32 a KV group
    slots        one [T] int64 a KV group: block * block_size + offset; -1 writes nothing (padding)
    state_slots  [B] int64    recurrent state slot of each entry (empty when the model has none)
    max_query, max_context    host bounds: no entry computes or reads more. Kernels read the true lengths from the
                              device; a captured graph never bakes them in.
    max_total_context  host bound on the tokens that entries past num_single have in the cache together; 0 when none is
                       known
    deferred     of a step with drafts, what layers with a running state put off until it is known which of its tokens
                 stand: calls with their number for each entry, [B] int32. None: layers bring states up at once
    own          what is here of tokens that ranks share out; None: all
    attention    of these, what ops take that go entry by entry
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    entries: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    state_slots: torch.Tensor
    num_single: int
    max_query: int
    max_context: int
    max_total_context: int = 0
    deferred: list[Callable[[torch.Tensor], None]] | None = None
    own: OwnTokens | None = None
    attention: AttentionBatch = field(init=False)

    def __post_init__(self) -> None:
        bounds = (self.num_single, self.max_query, self.max_context, self.max_total_context)
        num_kept = None if self.deferred is None else torch.zeros_like(self.context_len)
        object.__setattr__(
            self, "attention", AttentionBatch(self.query_start, self.context_len, *bounds, num_kept=num_kept)
        )


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each entry: of what the last layer gives, nobody reads the others.

    places       [B] int32    place of the entry's last token among the step's tokens
    starts       [B+1] int32  0 … B: query_start of entries that have this token alone
    """

    places: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledEntries:
    """What sampling needs of a step's entries, each [B] int32: table row, row that takes the token, tokens held."""

    rows: torch.Tensor
    out_rows: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class Proposals:
    """What entries draft: of each entry [B] int32 how many tokens, and of its proposals the first's position and how
    many there are; the proposals [L, W] int32 of the L entries past num_single."""

    count: torch.Tensor
    start: torch.Tensor
    size: torch.Tensor
    tokens: torch.Tensor


def select_last(x: torch.Tensor, last_tokens: LastTokens | None) -> torch.Tensor:
    """What of x [T, …] is still read: all of it, or [B, …] of the entries' last tokens."""
    return x if last_tokens is None else x.index_select(0, last_tokens.places)
