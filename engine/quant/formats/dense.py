"""Numbers stored as they are, in the dtype that products are taken in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.quant.format import Declared, Format
from engine.weights.rules import Rule, Shape
from kernels.weight import Dense as Value


@dataclass(frozen=True, slots=True)
class Dense(Format):
    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        return {"data": (shape, dtype)}

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        return [replace(rule, target=f"{rule.target}.data")]

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        return Value(parameters["data"])

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        parameters["data"].normal_(0.0, std, generator=generator)
