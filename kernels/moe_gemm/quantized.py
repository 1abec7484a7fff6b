"""Feed-forward parts of chosen experts with quantized weights, by the kernels that `quantized_dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.moe_gemm.operands import Operands
from kernels.moe_gemm.quantized_dispatch import DISPATCH, WRITTEN_PAIRS, QuantizedProblem, few_pairs
from kernels.moe_gemm.quantized_ring import Quantized, ring_fits
from kernels.moe_gemm.w8a8 import tiled
from kernels.moe_gemm.written_out import writes_out
from kernels.routing import ExpertBiases
from kernels.weight import Fp4, Fp8, Int8, PackedInt
from kernels.workspace import Workspace

KINDS: dict[type, str] = {Fp4: "fp4", Fp8: "fp8", Int8: "int8", PackedInt: "packed"}


def moe_gemm(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Quantized,
    down: Quantized,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    num_shared: int = 0,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. Every shape that a launch depends on is known to the host, so that graphs can hold it."""
    if not len(x):
        return torch.empty_like(x)
    kind, pairs, count = KINDS[type(gate_up)], experts.numel(), len(gate_up.data)
    ring = not deterministic and few_pairs(kind, pairs, count) and ring_fits(x, gate_up, down)
    written = not deterministic and pairs >= WRITTEN_PAIRS * count and writes_out(gate_up, down)
    tiles = tiled(gate_up) and tiled(down)
    choice = DISPATCH.choose(QuantizedProblem(kind, pairs, count, x.dtype, deterministic, ring, written, tiles))
    given = (x, gate_up, down, weights, experts, residual, activation, limit, num_shared, biases)
    y: torch.Tensor = choice.launch(Operands(workspace, *given), choice.config)
    return y
