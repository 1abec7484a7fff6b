"""Matrix product with dense weights stored as [out, in], fused with its neighbours when there are few rows."""

from __future__ import annotations

import torch

from kernels.hardware import group_products, multiprocessors
from kernels.linear.dispatch import DISPATCH, STREAM_ROWS, Operands, Problem
from kernels.linear.gated_persistent import gated_persistent_fits
from kernels.linear.skinny import INTERPRETED
from kernels.linear.stream import NARROW, aligned, streams, weight_aligned
from kernels.rms_norm.kernel import rms_norm
from kernels.weight import Dense
from kernels.workspace import Workspace


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: Dense,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """y = residual + act(norm(x) @ weightᵀ + bias), each of norm, bias, act and residual only when it is given.

    Shapes as in the reference; weight is contiguous, rows of x and residual may be strided. Up to 64 rows of a 16-bit
    type take one kernel, which rounds once, at the end; so do many rows behind an activation. float32 goes to cuBLAS at
    any size. y may stand in residual's place. An activation excludes a residual.
    """
    data = weight.data
    (rows, k), n, device = x.shape, data.shape[0], x.device
    n = n // 2 if activation else n
    if not rows:
        return x.new_zeros((0, n))
    narrow = x.dtype != torch.float32 or INTERPRETED
    if norm_weight is not None and not (rows == 1 and narrow and not deterministic):
        x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
        norm_weight = None
    if deterministic:
        copies = group_products(device) and _invariant_copies(data, bias, activation)
        x, residual = _aligned(x, copies), None if residual is None else _aligned(residual, copies)
    else:
        copies = _copies(x, rows, data, bias, activation)
    normed = norm_weight is not None
    problem = Problem(
        rows, n, k, x.dtype, normed, activation, deterministic, copies, narrow, multiprocessors(device), workspace.table
    )
    choice = DISPATCH.choose(problem)
    operands = Operands(workspace, x, data, bias, norm_weight, eps, offset, residual, activation)
    y: torch.Tensor = choice.launch(operands, choice.config)
    return y


def _copies(
    x: torch.Tensor, rows: int, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> bool:
    """Whether the bulk copy engine reads, and behind an activation writes, all that kernels of so many rows need."""
    if rows == 1 or not group_products(x.device):
        return False
    if rows <= STREAM_ROWS:
        return streams(x, weight)
    return activation is not None and gated_persistent_fits(x, weight, bias)


def _invariant_copies(weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> bool:
    """Whether the bulk copy engine reads and writes a batch-invariant product at any number of rows: nothing of x may
    decide."""
    outputs = weight.shape[0] // (2 if activation else 1)
    narrow = weight.dtype in NARROW
    return narrow and weight_aligned(weight) and outputs % 8 == 0 and (activation is None or bias is None)


def _aligned(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    """x as the bulk copy engine can read it, where that is wanted."""
    return x if not wanted or aligned(x) else x.clone(memory_format=torch.contiguous_format)
