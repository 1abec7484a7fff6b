"""Products with weights of packed integers and of 4-bit floats: the rounding of inputs, and the kernel that
`packed_dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.hardware import multiprocessors
from kernels.linear.mixed_input import mixed_input_fits
from kernels.linear.packed_dispatch import DISPATCH, PackedOperands, PackedProblem
from kernels.linear.packed_groups import fine
from kernels.linear.packed_rows import as_numbers
from kernels.linear.quantized_stream import streams_packed
from kernels.linear.quantized_vector import reads_packed
from kernels.rms_norm.kernel import rms_norm
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
    rows = len(x)
    n = weight.shape[0] // (2 if activation else 1)
    if not rows:
        return x.new_zeros((0, n))
    scales = None
    if weight.rounds_inputs:
        x, scales = as_numbers(workspace, x, weight, norm_weight, eps, offset)
        norm_weight = None
    if isinstance(weight, PackedInt) and weight.columns > weight.inputs:
        # Kernels know no order that has more columns than x.
        if norm_weight is not None:
            x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
            norm_weight = None
        assert weight.order is not None
        x, weight = x.index_select(1, weight.order), weight.in_place()
    integers = weight if isinstance(weight, PackedInt) and scales is None else None
    vector = integers is not None and reads_packed(x, integers)
    streams = integers is not None and streams_packed(x, integers)
    mixed = integers is not None and mixed_input_fits(x, integers)
    shape = (rows, n, x.shape[1], activation is not None, deterministic, vector, streams)
    groups = integers is not None and fine(integers)
    about = (multiprocessors(x.device), workspace.table, mixed, scales is not None, groups)
    choice = DISPATCH.choose(PackedProblem(*shape, *about))
    beside = (norm_weight, eps, offset, residual, activation, deterministic)
    y: torch.Tensor = choice.launch(PackedOperands(workspace, x, weight, bias, *beside, scales), choice.config)
    return y
