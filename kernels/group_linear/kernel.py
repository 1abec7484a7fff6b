"""A matrix product for each group of channels, by the launches that `dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.group_linear.dispatch import grouped
from kernels.group_linear.fp8 import WIDTH
from kernels.weight import Dense, Fp8, Weight
from kernels.workspace import Workspace


def group_linear(workspace: Workspace, x: torch.Tensor, weight: Weight, deterministic: bool = False) -> torch.Tensor:
    """See the reference. Each group of a dense weight is contiguous.

    Raises TypeError for a kind of weight without launches: there are some for dense ones, and for 8-bit floats with
    scales for 128 by 128.
    """
    if isinstance(weight, Dense) or (isinstance(weight, Fp8) and weight.block == (WIDTH, WIDTH)):
        return grouped(workspace, x.contiguous(), weight, deterministic)
    blocks = f" in blocks of {weight.block}" if isinstance(weight, Fp8) else ""
    raise TypeError(f"group_linear has no launch for weights of the kind {type(weight).__name__}{blocks}")
