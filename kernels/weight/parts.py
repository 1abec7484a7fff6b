"""A weight whose rows are of several kinds: projections that form one product and are stored in different ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.weight.base import Weight, rows_of_parts


@dataclass(frozen=True, slots=True)
class Parts(Weight):
    """parts[i] [.., N_i, K] are rows of one matrix, or of each matrix of a table, N in all, one part behind another.
    Each takes the product's inputs in its own way: one may round them where another takes them as they are."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        *table, _, inputs = self.parts[0].shape
        return (*table, sum(self.rows_of), inputs)

    @property
    def rows_of(self) -> tuple[int, ...]:
        """How many rows each part has."""
        return tuple(part.shape[-2] for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def rounds_inputs(self) -> bool:
        return any(part.rounds_inputs for part in self.parts)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([part.dense(dtype) for part in self.parts], dim=-2)

    def matrix(self, index: int) -> Parts:
        return Parts(tuple(part.matrix(index) for part in self.parts))

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        def read(part: int, own: torch.Tensor) -> torch.Tensor:
            return self.parts[part].rows(own, dtype)

        return rows_of_parts(ids, self.rows_of, self.shape[-1], dtype, read)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        biases = (None,) * len(self.parts) if bias is None else bias.split(self.rows_of)
        held = zip(self.parts, biases, strict=True)
        return torch.cat([part.product(x, own, deterministic) for part, own in held], dim=-1)
