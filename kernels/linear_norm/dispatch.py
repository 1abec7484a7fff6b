"""Whether the norm behind a product adds up the product's partials, decided once a shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.linear.kernel import linear
from kernels.linear.split_k import SplitKTile, linear_partials, split_k_tile
from kernels.rms_norm.kernel import rms_norm, sum_norm
from kernels.weight import Dense, Weight
from kernels.workspace import Workspace


class Problem(NamedTuple):
    """What the choice of kernels depends on: x [rows, inputs] @ [outputs, inputs]ᵀ. streams: a dense weight and no
    bias, and the bulk copy engine reads both sides, on a GPU whose groups of warps multiply from shared memory."""

    rows: int
    outputs: int
    inputs: int
    streams: bool
    multiprocessors: int


class Operands(NamedTuple):
    """As in the reference."""

    workspace: Workspace
    x: torch.Tensor
    weight: Weight
    residual: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    offset: float
    bias: torch.Tensor | None


def _tile(problem: Problem) -> SplitKTile | None:
    return split_k_tile(problem.rows, problem.outputs, problem.inputs, problem.multiprocessors)


def _not_split(problem: Problem) -> str | None:
    if not problem.streams:
        return "needs Hopper, a dense weight in 16 bits on 16 bytes, and no bias"
    if _tile(problem) is None:
        return "for 33 to 64 rows and outputs that four programs a tile were measured to read sooner"
    return None


def _split(operands: Operands, tile: SplitKTile) -> tuple[torch.Tensor, torch.Tensor]:
    workspace, x, weight, residual, norm_weight, eps, offset, _ = operands
    assert isinstance(weight, Dense)
    partials = linear_partials(workspace, x, weight.data, tile)
    h, y = sum_norm(workspace, partials, norm_weight, eps, residual, offset)
    return y, h


def _apart(operands: Operands, _: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    workspace, x, weight, residual, norm_weight, eps, offset, bias = operands
    y = linear(workspace, x, weight, bias, residual=residual)
    return y, rms_norm(workspace, y, norm_weight, eps, offset=offset)[0]


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "split",
            _not_split,
            _tile,
            _split,
            "docs/experiments/2026-11-20-decode-products.md, split-K results added by the norm",
        ),
        Variant(
            "apart",
            lambda problem: None,
            lambda problem: None,
            _apart,
            "what nothing else takes: linear, then rms_norm; docs/experiments/2026-11-20-decode-products.md",
        ),
    ]
)
