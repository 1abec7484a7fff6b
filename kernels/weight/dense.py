"""A weight whose numbers are stored as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.weight.base import Weight


@dataclass(frozen=True, slots=True)
class Dense(Weight):
    """data [N, K] or [E, N, K] in the dtype that products are taken in."""

    data: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data.to(dtype)

    def matrix(self, index: int) -> Dense:
        return Dense(self.data[index])

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.data).to(dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        if deterministic and x.device.type == "cpu":
            # CPU libraries pick their blocking by the number of rows, so each row is a product of its own.
            if not len(x):
                return x @ self.data.T
            return torch.cat([torch.nn.functional.linear(row, self.data, bias) for row in x.split(1)])
        return torch.nn.functional.linear(x, self.data, bias)
