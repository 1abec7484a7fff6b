"""Products with blocks of GGUF files: the norm, and the kernels that `gguf_dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.linear.gguf_dispatch import DISPATCH, GgufOperands, GgufProblem
from kernels.linear.gguf_stream import streams_blocks
from kernels.linear.gguf_vector import reads_blocks
from kernels.weight import GgufBlocks
from kernels.workspace import Workspace


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: GgufBlocks,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See `kernels.linear.kernel`. y may stand in residual's place."""
    rows, k = x.shape
    if not rows:
        return x.new_zeros((0, weight.shape[0] // (2 if activation else 1)))
    outputs = tuple(part.shape[0] for part in weight.parts)
    takes = (reads_blocks(x, weight), streams_blocks(x, weight), x.dtype != torch.float32)
    problem = GgufProblem(rows, outputs, k, activation is not None, deterministic, workspace.table, *takes)
    choice, normed = DISPATCH.choose(problem), (norm_weight, eps, offset)
    operands = GgufOperands(workspace, x, weight, bias, residual, activation, normed, deterministic)
    y: torch.Tensor = choice.launch(operands, choice.config)
    return y
