"""The interface of every kind of weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Weight(Protocol):
    """A matrix [N, K] of N outputs and K inputs, or a table of E such matrices [E, N, K], however it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] or [E, N, K], of the numbers and not of how they are stored."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and zero points together."""
        ...

    @property
    def rounds_inputs(self) -> bool:
        """Whether a product's inputs are rounded to few bits first."""
        return False

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers, `shape`, computed in float32 and rounded once to `dtype`."""
        ...

    def matrix(self, index: int) -> Weight:
        """Matrix `index` of a table."""
        ...

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [T] of a matrix as `dense` gives them: [T, K]. An embedding reads its table so."""
        ...

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        """The definition of x @ weightᵀ + bias for this kind: x [T, K] → [T, N] in x's dtype, accumulated in float32.

        deterministic: a row's result has the same bits whatever T is and wherever in x the row stands.
        """
        ...


def rows_of_parts(
    ids: torch.Tensor,
    counts: Sequence[int],
    inputs: int,
    dtype: torch.dtype,
    read: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Rows `ids` [T] of a matrix whose parts have `counts` rows, one part behind another: [T, inputs], zeros for rows
    that are not there. read(part, own rows [T] int64) gives a part's own rows in `dtype`."""
    chosen, start = ids.long(), 0
    made = torch.zeros(len(ids), inputs, dtype=dtype, device=ids.device)
    for part, count in enumerate(counts):
        own = chosen - start
        inside = (own >= 0) & (own < count)
        made = torch.where(inside[:, None], read(part, own.clamp(0, count - 1)), made)
        start += count
    return made
