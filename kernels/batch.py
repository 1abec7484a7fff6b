"""The sequences of a step (a plan's entries), as every op sees them that goes sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """B sequences of T tokens; sequences with one token come first.

    query_start  [B+1] int32  sequence i's tokens are query_start[i] … query_start[i+1]
    context_len  [B] int32    tokens of the sequence in the cache once the step has written its own; 0: padding
    num_single   sequences of one token
    max_total_context  host bound on the tokens that sequences past num_single have in the cache together; 0 when none
                       is known
    max_query, max_context    host bounds: no sequence computes or reads more. Kernels read the true lengths from the
                              device, so a captured graph serves any within the bounds.
    num_kept     [B] int32 or None: states are left as they stand behind so many of a sequence's tokens, 0 as they were;
                              None leaves them behind the last
    """

    query_start: torch.Tensor
    context_len: torch.Tensor
    num_single: int
    max_query: int
    max_context: int
    max_total_context: int = 0
    num_kept: torch.Tensor | None = None
