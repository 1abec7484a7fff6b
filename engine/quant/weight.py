"""The part of a layer that holds a projection's weight, in whatever format the checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from engine.quant.format import Format
from engine.quant.formats.dense import Dense
from engine.weights.checkpoint import WeightsError
from engine.weights.rules import Shape
from kernels.weight import Weight as Value

# What a weight's reader takes: any kind of it, dense numbers alone, or these and 8-bit floats with scales for 128 by
# 128, beside inputs that nothing rounds.
Kinds = Literal["any", "dense", "dense or fp8"]


class Weight(nn.Module):
    """A matrix [N, K], or a table of matrices [E, N, K], without memory until the decoder is materialized.

    It is made dense; `hold` gives it another format before that. kinds: what its reader takes; a source of
    another kind is dequantized while it is loaded.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, kinds: Kinds = "any") -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.kinds = kinds
        self._value: Value | None = None
        self.hold(Dense())

    def hold(self, held: Format) -> None:
        """Take `held` as the format. Parameters get new names and shapes, and have no memory."""
        self._parameters.clear()
        self.held = held
        for name, (shape, dtype) in held.declare(self.shape, self.dtype).items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._value = None

    @property
    def value(self) -> Value:
        """What kernels take."""
        if self._value is None:
            self._value = self.held.value(self._tensors())
        return self._value

    @property
    def count(self) -> int:
        """Numbers of the weight, however they are stored."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def draw(self, std: float, generator: torch.Generator) -> None:
        """Fill it with random numbers of that standard deviation."""
        self.held.draw(self._tensors(), std, generator)
        self._value = None

    def check(self, name: str) -> None:
        """Look at parameters that were just filled, as the format does; what was computed of them before, when kernels
        were compiled, is forgotten. Raises WeightsError with `name` in it."""
        self._value = None
        try:
            self.held.check(self._tensors())
        except WeightsError as error:
            raise WeightsError(f"the weights of {name}: {error}") from None

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter is not None}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Weight:
        super()._apply(fn, recurse)
        self._value = None
        return self
