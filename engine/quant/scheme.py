"""How a checkpoint stores the weights of one module, as frozen values. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activations = Literal["as they are", "dynamic by token", "dynamic by 128", "static"]


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """8-bit floats (e4m3) with scales. What the scales are for is told by their shape.

    block: outputs and inputs of a block, where scales are by block. power_of_two: scales of inputs are powers of two.
    """

    activations: Activations
    block: tuple[int, int] | None = None
    power_of_two: bool = False


Scheme = Fp8Scheme
