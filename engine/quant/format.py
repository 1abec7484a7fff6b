"""The interface of a format: the parameters that hold a weight, what fills them, and the value that kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engine.weights.rules import Rule, Shape
from kernels.weight import Weight as Value

# Of each parameter its shape and dtype, by name.
Declared = dict[str, tuple[Shape, torch.dtype]]


class Format(Protocol):
    """One weight's format, made by `engine.quant.plan` when the checkpoint's tensors are known."""

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        """The parameters of a weight of `shape` [.., N, K] whose products are taken in `dtype`."""
        ...

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        """What fills those parameters, given the weight's shape and the rule that names it and its sources' `.weight`
        tensors. A rule's target is the weight's, a dot and the parameter's name."""
        ...

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        """What kernels take, made of the filled parameters."""
        ...

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        """Fill the parameters with random numbers whose weight has the standard deviation `std`."""
        ...
