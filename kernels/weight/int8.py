"""A weight of 8-bit integers with a scale a row (SmoothQuant, arXiv:2211.10438)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.weight.base import Weight
from kernels.weight.dense import Dense
from kernels.weight.inputs import Inputs, quantized


@dataclass(frozen=True, slots=True)
class Int8(Weight):
    """w[n, k] = data[n, k] · scale[n]. data int8 [.., N, K], scale [.., N, 1] float32. inputs says how x is quantized
    before the product."""

    data: torch.Tensor
    scale: torch.Tensor
    inputs: Inputs

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        return 1, self.data.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    @property
    def rounds_inputs(self) -> bool:
        return self.inputs.number is not None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.data.float() * self.scale).to(dtype)

    def matrix(self, index: int) -> Int8:
        return Int8(self.data[index], self.scale[index], self.inputs)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        chosen = ids.long()
        return (self.data[chosen].float() * self.scale[chosen]).to(dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        wide = None if bias is None else bias.float()
        return Dense(self.dense(torch.float32)).product(quantized(x, self.inputs), wide, deterministic).to(x.dtype)
