"""A weight of packed 4-bit or 8-bit integers, with a scale for each group of inputs of a row (GPTQ, arXiv:2210.17323;
AWQ, arXiv:2306.00978)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.sizes import cdiv
from kernels.weight.base import Weight
from kernels.weight.dense import Dense
from kernels.weight.inputs import AS_THEY_ARE, Inputs, quantized


@dataclass(frozen=True, slots=True)
class PackedInt(Weight):
    """w[n, order[k]] = (u[n, k] − zero[n, k // group]) · scale[n, k // group], of unsigned integers u in C columns k.

    data uint8 [.., N, B]: u[n, k] are `bits` bits (4 or 8) of byte k · bits // 8, the low ones first; bits behind the
    last column are arbitrary. scale [.., N, ceil(C / group)] of any float dtype; zero, integers of that shape; None
    stands for 2^(bits − 1). order [.., C] int32 holds each input once, and any input for columns that are worth zero in
    all rows; None leaves inputs in place, C of them. rounding says what a row of x becomes before the product.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    order: torch.Tensor | None
    bits: int
    group: int
    inputs: int
    rounding: Inputs = AS_THEY_ARE

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.inputs)

    @property
    def columns(self) -> int:
        """Of a row: its inputs, and columns that are worth zero."""
        return self.inputs if self.order is None else self.order.shape[-1]

    @property
    def nbytes(self) -> int:
        beside = (self.zero, self.order)
        return self.data.nbytes + self.scale.nbytes + sum(part.nbytes for part in beside if part is not None)

    @property
    def rounds_inputs(self) -> bool:
        return self.rounding.number is not None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        numbers = integers(self.data, self.bits)[..., : self.columns].float()
        numbers = self._scaled(numbers, self.scale, self.zero).to(dtype)
        if self.order is None:
            return numbers
        places = self.order.long()[..., None, :].expand_as(numbers)
        made = numbers.new_zeros((*numbers.shape[:-1], self.inputs))
        return made.scatter_add_(-1, places, numbers)

    def in_place(self) -> PackedInt:
        """The columns of a matrix as a weight of their own, whose product takes x[:, order]."""
        return replace(self, order=None, inputs=self.columns)

    def matrix(self, index: int) -> PackedInt:
        zero = None if self.zero is None else self.zero[index]
        order = None if self.order is None else self.order[index]
        about = (self.bits, self.group, self.inputs, self.rounding)
        return PackedInt(self.data[index], self.scale[index], zero, order, *about)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        chosen = ids.long()
        zero = None if self.zero is None else self.zero[chosen]
        some = PackedInt(self.data[chosen], self.scale[chosen], zero, self.order, self.bits, self.group, self.inputs)
        return some.dense(dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        wide = None if bias is None else bias.float()
        return Dense(self.dense(torch.float32)).product(quantized(x, self.rounding), wide, deterministic).to(x.dtype)

    def _scaled(self, numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """numbers [.., N, C] float32, less their zero points and times their scales."""
        groups = cdiv(self.columns, self.group)
        pad = groups * self.group - self.columns
        parts = torch.nn.functional.pad(numbers, (0, pad)).unflatten(-1, (groups, self.group))
        parts = parts - (2 ** (self.bits - 1) if zero is None else zero.float()[..., None])
        return (parts * scale.float()[..., None]).flatten(-2)[..., : self.columns]


def integers(data: torch.Tensor, bits: int) -> torch.Tensor:
    """data uint8 [.., B] → its integers [.., B · 8 / bits] uint8."""
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """numbers uint8 [.., K] → data [.., B] uint8: a row is as many whole words of 32 bits as it needs, zeros behind."""
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % (32 // bits)))
    if bits == 8:
        return numbers.contiguous()
    # Two numbers are one of 16 bits, the first in the low byte: the upper four bits of that are free for the second.
    pairs = numbers.contiguous().view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
