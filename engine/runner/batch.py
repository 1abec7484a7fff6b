"""What the decoder sees of a step: device tensors with their shapes. Built by `inputs`, read by layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """T tokens in B lines. Lines with one token come first; `num_single` of them.

    token_ids    [T] int32    inputs
    positions    [T] int32    place of each token in its request
    lines        [T] int32    line of each token
    query_start  [B+1] int32  line i owns tokens query_start[i] … query_start[i+1]
    context_len  [B] int32    tokens in the cache for the line once this step has written its own
    block_tables one [B, M] int32 a KV group
    slots        one [T] int64 a KV group: block * block_size + offset; -1 writes nothing (padding)
    state_slots  [B] int64    recurrent state slot of each line (empty when the model has none)
    max_query, max_context    host bounds: no line computes or reads more. Kernels read the true lengths from the
                              device; a captured graph never bakes them in.
    max_entries  host bound on the tokens that lines past num_single have in the cache together; 0 when none is known
    attention    of these, what ops take that go line by line
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lines: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    state_slots: torch.Tensor
    num_single: int
    max_query: int
    max_context: int
    max_entries: int = 0
    attention: AttentionBatch = field(init=False)

    def __post_init__(self) -> None:
        bounds = (self.num_single, self.max_query, self.max_context, self.max_entries)
        object.__setattr__(self, "attention", AttentionBatch(self.query_start, self.context_len, *bounds))


@dataclass(frozen=True, slots=True)
class LineEnds:
    """The last token of each line: of what the last layer gives, nobody reads the others.

    places       [B] int32    place of the line's last token among the step's tokens
    starts       [B+1] int32  0 … B: query_start of lines that have this token alone
    """

    places: torch.Tensor
    starts: torch.Tensor


def kept(x: torch.Tensor, ends: LineEnds | None) -> torch.Tensor:
    """What of x [T, …] is still read: all of it, or [B, …] of the lines' ends."""
    return x if ends is None else x.index_select(0, ends.places)
