"""How a checkpoint stores the weights of one module, as frozen values. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["pack-quantized", "int-quantized", "w4afp8", "gptq", "awq"]
Fp4Layout = Literal["mxfp4-pack-quantized", "nvfp4-pack-quantized", "modelopt", "scale"]
# Inputs that share an exponent (OCP Microscaling Formats 1.0).
MX_GROUP = 32
Activations = Literal["as they are", "dynamic by token", "dynamic by 128", "dynamic by 32", "static"]


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """8-bit floats (e4m3) with scales. What the scales are for is told by their shape.

    block: outputs and inputs of a block, where scales are by block. power_of_two: scales of inputs are powers of two.
    largest: a magnitude that inputs are clipped to where their scales are computed.
    """

    activations: Activations
    block: tuple[int, int] | None = None
    power_of_two: bool = False
    largest: float | None = None

    @property
    def exponents(self) -> bool:
        """Whether scales are stored as exponents, of groups of inputs (MXFP8)."""
        return self.block == (1, MX_GROUP)


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """Integers of `bits` bits, with a scale for each `group` inputs of a row; 0: one for all.

    layout: whose names and packing these are. zeros: zero points are stored, less `shift`. ordered: a tensor says for
    each input which group it is of; otherwise groups are runs of inputs. activations: how scales of inputs are found,
    where products round their inputs to `number`.
    """

    layout: Layout
    bits: int
    group: int
    zeros: bool = False
    ordered: bool = False
    shift: int = 0
    activations: Activations = "as they are"
    number: Literal["fp8", "int8"] = "int8"


@dataclass(frozen=True, slots=True)
class Int8Scheme:
    """8-bit integers with a scale a row, or one in all."""

    activations: Activations


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """4-bit floats (e2m1) with a scale for each 16 or 32 inputs of a row. layout: whose names these are.
    quantized_inputs: products round their inputs to 4 bits too."""

    layout: Fp4Layout
    quantized_inputs: bool = False


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """Blocks of a GGUF file. Each tensor says of which format."""


Scheme = Fp4Scheme | Fp8Scheme | GgufScheme | Int8Scheme | PackedScheme
