"""A weight of 4-bit floats (e2m1) with a scale for each group of inputs of a row: MXFP4 (OCP Microscaling Formats 1.0)
and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sizes import cdiv
from kernels.weight.base import Weight
from kernels.weight.dense import Dense
from kernels.weight.inputs import AS_THEY_ARE, Inputs, quantized
from kernels.weight.packed import integers

# Of the codes 0 to 7; bit 3 is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Fp4(Weight):
    """w[n, k] = e2m1[n, k] · scale[n, k // group] · factor[n].

    data uint8 [.., N, B]: two numbers a byte, the one of the even k in the low bits; bits behind the last input are
    arbitrary. scale [.., N, ceil(inputs / group)]: uint8 holds exponents (e8m0: 2^(b − 127), 255 is NaN),
    float8_e4m3fn numbers. factor [.., N] float32; None stands for 1. group is 16 or 32. rounding says what x becomes
    before the product.
    """

    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor | None
    group: int
    inputs: int
    rounding: Inputs = AS_THEY_ARE

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.inputs)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes + (0 if self.factor is None else self.factor.nbytes)

    @property
    def rounds_inputs(self) -> bool:
        return self.rounding.number is not None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        groups = cdiv(self.inputs, self.group)
        numbers = e2m1(self.data)[..., : self.inputs]
        pad = groups * self.group - self.inputs
        parts = torch.nn.functional.pad(numbers, (0, pad)).unflatten(-1, (groups, self.group))
        wide = (parts * scales(self.scale)[..., None]).flatten(-2)[..., : self.inputs]
        return (wide if self.factor is None else wide * self.factor[..., None]).to(dtype)

    def matrix(self, index: int) -> Fp4:
        factor = None if self.factor is None else self.factor[index]
        return Fp4(self.data[index], self.scale[index], factor, self.group, self.inputs, self.rounding)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        chosen = ids.long()
        factor = None if self.factor is None else self.factor[chosen]
        scale = self.scale.view(torch.uint8)[chosen].view(self.scale.dtype)
        return Fp4(self.data[chosen], scale, factor, self.group, self.inputs).dense(dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        wide = None if bias is None else bias.float()
        return Dense(self.dense(torch.float32)).product(quantized(x, self.rounding), wide, deterministic).to(x.dtype)


def e2m1(data: torch.Tensor) -> torch.Tensor:
    """data uint8 [.., B] → its numbers [.., 2B] float32."""
    table = torch.tensor((*MAGNITUDES, *(-size for size in MAGNITUDES)), device=data.device)
    return table[integers(data, 4).int()]


def scales(stored: torch.Tensor) -> torch.Tensor:
    """Scales as they are stored → float32. Bytes are exponents, 0 is 2^−127 and 255 NaN."""
    if stored.dtype != torch.uint8:
        return stored.float()
    powers = torch.exp2(stored.double() - 127).float()
    return powers.masked_fill(stored == 255, float("nan"))
