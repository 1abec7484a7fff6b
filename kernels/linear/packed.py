"""Products with weights of packed integers and of 4-bit floats: the rounding of inputs, and the kernel that
`packed_dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.hardware import multiprocessors
from kernels.linear.mixed_input import mixed_input_fits
from kernels.linear.packed_dispatch import DISPATCH, PackedOperands, PackedProblem
from kernels.linear.quantized_stream import streams_packed
from kernels.linear.quantized_vector import reads_packed
from kernels.round_fp4.kernel import round_fp4
from kernels.weight import Fp4, PackedInt
from kernels.workspace import Workspace


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: PackedInt | Fp4,
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
    n = weight.shape[0] // (2 if activation else 1)
    if not rows:
        return x.new_zeros((0, n))
    if isinstance(weight, Fp4) and weight.rounding.number is not None:
        x, norm_weight = round_fp4(workspace, x, weight.rounding, norm_weight, eps, offset), None
    vector = isinstance(weight, PackedInt) and reads_packed(x, weight)
    streams = isinstance(weight, PackedInt) and streams_packed(x, weight)
    mixed = isinstance(weight, PackedInt) and mixed_input_fits(x, weight)
    shape = (rows, n, k, activation is not None, deterministic, vector, streams)
    choice = DISPATCH.choose(PackedProblem(*shape, multiprocessors(x.device), workspace.table, mixed))
    beside = (norm_weight, eps, offset, residual, activation, deterministic)
    y: torch.Tensor = choice.launch(PackedOperands(workspace, x, weight, bias, *beside), choice.config)
    return y
