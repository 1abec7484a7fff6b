"""Feed-forward parts of the chosen experts: each kind of weight has its own launches, looked up once a call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.moe_gemm import apart, dense, gguf, quantized
from kernels.routing import ExpertBiases
from kernels.weight import Dense, Fp4, Fp8, GgufBlocks, Int8, PackedInt, Parts, Weight
from kernels.weight.gguf import as_blocks
from kernels.workspace import Workspace

# Each takes the workspace, tables of its kind and the op's other arguments.
LAUNCHES: dict[type, Callable[..., torch.Tensor]] = {
    Dense: dense.moe_gemm,
    Fp4: quantized.moe_gemm,
    Fp8: quantized.moe_gemm,
    GgufBlocks: gguf.moe_gemm,
    Int8: quantized.moe_gemm,
    PackedInt: quantized.moe_gemm,
}


def moe_gemm(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    num_shared: int = 0,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. Calls on a device share their counters: they must run in one stream order.

    Raises TypeError for a kind of weight without launches, and for blocks of GGUF files beside another kind.
    """
    if isinstance(gate_up, GgufBlocks) or isinstance(down, GgufBlocks):
        # A file may leave either as it is.
        gate_up, down = as_blocks(gate_up), as_blocks(down)
    launch = LAUNCHES.get(type(gate_up))
    if isinstance(gate_up, Parts) or type(down) is not type(gate_up):
        launch = apart.moe_gemm
    if launch is None or {type(gate_up), type(down)} > {GgufBlocks}:
        kinds = f"{type(gate_up).__name__} and {type(down).__name__}"
        raise TypeError(f"moe_gemm has no launch for experts of the kinds {kinds}")
    given = (weights, experts, residual, activation, limit, num_shared, deterministic, biases)
    return launch(workspace, x, gate_up, down, *given)
