"""Feed-forward parts of chosen experts with quantized weights, by the kernels that `quantized_dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.moe_gemm.alone_cut import ALONE_PAIRS
from kernels.moe_gemm.dense import takes_tiles
from kernels.moe_gemm.dispatch import many_pairs
from kernels.moe_gemm.fp8_alone import alone_fits
from kernels.moe_gemm.grouped_fp8 import grouped_fp8_fits
from kernels.moe_gemm.operands import Operands
from kernels.moe_gemm.quantized_dispatch import DISPATCH, GROUPED_FP8, QuantizedProblem, few_pairs, fills_experts
from kernels.moe_gemm.quantized_ring import Quantized, ring_fits
from kernels.moe_gemm.w8a8 import tiled
from kernels.moe_gemm.written_out import writes_out
from kernels.routing import ExpertBiases
from kernels.weight import Fp4, Fp8, Int8, PackedInt
from kernels.workspace import Workspace

KINDS: dict[type, str] = {Fp4: "fp4", Fp8: "fp8", Int8: "int8", PackedInt: "packed"}
# Of which numbers can be written out.
PACKED = ("fp4", "packed")


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
    """See the reference. Every shape that a launch depends on is known to the host, so that graphs can hold it.

    Raises ValueError for scales of 8-bit numbers that are neither of 128 inputs nor of all of a row.
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    kind, pairs, count, table = KINDS[type(gate_up)], experts.numel(), gate_up.data.shape[0], workspace.table
    ring = not deterministic and few_pairs(kind, pairs, count, table) and ring_fits(x, gate_up, down)
    alone = not deterministic and pairs <= ALONE_PAIRS and alone_fits(x, gate_up, down)
    packed = kind in PACKED
    written = packed and not deterministic and fills_experts(pairs, count, table) and writes_out(gate_up, down)
    if not packed and not (tiled(gate_up) and tiled(down)):
        raise ValueError(
            f"moe_gemm has no kernel for {kind} experts whose scales are not of 128 or 32 inputs or of all"
        )
    plain = not takes_tiles(activation, biases)
    groups = (
        plain
        and many_pairs(pairs, count, table, GROUPED_FP8)
        and grouped_fp8_fits(x, gate_up, down, workspace.fast_sums)
    )
    problem = QuantizedProblem(kind, pairs, count, x.dtype, deterministic, ring, written, table, groups, alone)
    choice = DISPATCH.choose(problem)
    operands = Operands(workspace, x, gate_up, down, weights, experts, residual, activation, limit, num_shared, biases)
    y: torch.Tensor = choice.launch(operands, choice.config)
    return y
