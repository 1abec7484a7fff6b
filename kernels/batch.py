"""The lines of a step, as every op sees them that goes line by line."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """B lines of T tokens; lines with one token come first.

    query_start  [B+1] int32  line i's tokens are query_start[i] … query_start[i+1]
    context_len  [B] int32    tokens of the line in the cache once the step has written its own; 0: padding
    num_single   lines of one token
    max_total_context  host bound on the tokens that lines past num_single have in the cache together; 0 when none is
                       known
    max_query, max_context    host bounds: no line computes or reads more. Kernels read the true lengths from the
                              device, so a captured graph serves any within the bounds.
    """

    query_start: torch.Tensor
    context_len: torch.Tensor
    num_single: int
    max_query: int
    max_context: int
    max_total_context: int = 0
