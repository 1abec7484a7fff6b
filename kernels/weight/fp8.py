"""A weight of 8-bit floats with scales: by blocks (DeepSeek-V3, arXiv:2412.19437, section 3.3), or rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.weight.base import Weight
from kernels.weight.dense import Dense
from kernels.weight.inputs import Inputs, quantized

# The most inputs of a row that share a scale with other rows: kernels read such scales by tiles of so many inputs.
MAX_SHARED = 128


@dataclass(frozen=True, slots=True)
class Fp8(Weight):
    """w[n, k] = data[n, k] · scale[n // block[0], k // block[1]].

    data [.., N, K] float8_e4m3fn; scale [.., ceil(N / block[0]), ceil(K / block[1])] float32; a row's scale has block
    (1, K). inputs says how x is quantized before the product. Raises ValueError where rows share one scale for all of
    more than MAX_SHARED inputs.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    inputs: Inputs

    def __post_init__(self) -> None:
        k = self.data.shape[-1]
        if self.block[0] > 1 and self.scale.shape[-1] == 1 and k > MAX_SHARED:
            shared = f"{self.block[0]} rows share one scale for all {k} inputs"
            raise ValueError(f"{shared}, which may be up to {MAX_SHARED}: give each row its scale")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    @property
    def rounds_inputs(self) -> bool:
        return self.inputs.number is not None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.data.float() * self._spread()).to(dtype)

    def matrix(self, index: int) -> Fp8:
        return Fp8(self.data[index], self.scale[index], self.block, self.inputs)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = self.scale[ids.long() // self.block[0]]
        spread = scale.repeat_interleave(self.block[1], dim=-1)[:, : self.data.shape[-1]]
        return (self.data.view(torch.uint8)[ids.long()].view(torch.float8_e4m3fn).float() * spread).to(dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        wide = quantized(x, self.inputs)
        y = Dense(self.dense(torch.float32)).product(wide, None if bias is None else bias.float(), deterministic)
        return y.to(x.dtype)

    def _spread(self) -> torch.Tensor:
        """A scale for each number: [.., N, K]."""
        n, k = self.data.shape[-2:]
        rows = self.scale.repeat_interleave(self.block[0], dim=-2)[..., :n, :]
        return rows.repeat_interleave(self.block[1], dim=-1)[..., :k]
