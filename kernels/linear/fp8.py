"""Products with weights of 8-bit floats or integers: numbers of both sides are multiplied, sums of 128 inputs are
scaled and added up in float32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), by the kernel that `fp8_dispatch`
chooses."""

from __future__ import annotations

import torch

from kernels.linear.fp8_dispatch import DISPATCH, FEW_ROWS, SPLIT_ROWS, Fp8Operands, Fp8Problem
from kernels.linear.fp8_library import in_library
from kernels.linear.fp8_row_stream import row_streams_fp8
from kernels.linear.quantized_stream import streams_fp8
from kernels.linear.quantized_vector import reads_fp8
from kernels.weight import Fp8, Int8
from kernels.workspace import Workspace


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: Fp8 | Int8,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See `kernels.linear.kernel`. y may stand in residual's place."""
    (rows, _), (n, k), gated = x.shape, weight.data.shape, activation is not None
    n = n // 2 if gated else n
    if not rows:
        return x.new_zeros((0, n))
    library = rows > FEW_ROWS and not deterministic and in_library(weight, x.dtype)
    streams = SPLIT_ROWS < rows <= FEW_ROWS and isinstance(weight, Fp8) and streams_fp8(weight)
    vector = isinstance(weight, Fp8) and reads_fp8(x, weight)
    row_streams = isinstance(weight, Fp8) and row_streams_fp8(x, weight, gated)
    choice = DISPATCH.choose(
        Fp8Problem(rows, n, k, gated, deterministic, vector, library, streams, workspace.table, row_streams)
    )
    operands = Fp8Operands(workspace, x, weight, bias, norm_weight, eps, offset, residual, activation, deterministic)
    y: torch.Tensor = choice.launch(operands, choice.config)
    return y
