"""What a projection holds, as one value: data, scales, zero points and layout. Dense is one kind.

Ops of projections take a `Weight`. Their references ask it for its product; their kernels accept the kinds that they
have a launch for (`kernels.linear.kernel`, `kernels.moe.kernel`).
"""

from kernels.weight.base import Weight
from kernels.weight.dense import Dense
from kernels.weight.fp4 import Fp4
from kernels.weight.fp8 import Fp8
from kernels.weight.gguf import GgufBlocks
from kernels.weight.int8 import Int8
from kernels.weight.packed import PackedInt
from kernels.weight.parts import Parts

__all__ = ["Dense", "Fp4", "Fp8", "GgufBlocks", "Int8", "PackedInt", "Parts", "Weight"]
