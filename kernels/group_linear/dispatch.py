"""Which kernel multiplies groups of channels, and its tiles, decided once a shape.

Few rows take a Triton kernel that reads each weight once, as it is stored. For many rows a weight of 8-bit floats is
written out, and cuBLAS multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.group_linear.dense import GroupTile, group_rows, library
from kernels.group_linear.fp8 import WIDTH, group_fp8, written_out
from kernels.sizes import next_power_of_2
from kernels.weight import Dense, Fp8
from kernels.workspace import Workspace

SPLIT_ROWS, FEW_ROWS = 16, 64


class Problem(NamedTuple):
    """What the choice of a kernel depends on.

    rows, inputs: of each group. fp8: the weight is of 8-bit floats with scales for 128 by 128.
    """

    rows: int
    inputs: int
    dtype: torch.dtype
    fp8: bool
    deterministic: bool


class Operands(NamedTuple):
    """What a kernel is launched on; x is contiguous."""

    workspace: Workspace
    x: torch.Tensor
    weight: Dense | Fp8
    deterministic: bool


def _few(problem: Problem) -> bool:
    """Whether a tile has few rows: for a batch-invariant product there is one tile whatever rows there are."""
    return problem.rows <= SPLIT_ROWS and not problem.deterministic


def tile(problem: Problem) -> GroupTile:
    """Of a dense weight."""
    rows = SPLIT_ROWS if _few(problem) else FEW_ROWS
    if problem.dtype == torch.float32:
        return GroupTile(rows, 32, 64, 2)
    return GroupTile(rows, 32, min(256 if _few(problem) else 128, next_power_of_2(problem.inputs)), 4)


def fp8_tile(problem: Problem) -> GroupTile:
    """About two programs a multiprocessor for up to 16 rows, one of twice the outputs for more."""
    if problem.dtype == torch.float32:
        return GroupTile(SPLIT_ROWS if _few(problem) else FEW_ROWS, 32 if _few(problem) else 64, WIDTH, 2)
    if _few(problem):
        return GroupTile(SPLIT_ROWS, 32, 2 * WIDTH, 5)
    return GroupTile(FEW_ROWS, 64, WIDTH, 6)


def _not_rows(problem: Problem) -> str | None:
    if problem.rows <= FEW_ROWS or problem.deterministic:
        return None
    return f"for up to {FEW_ROWS} rows, and for runtime.deterministic"


def _not_dense_rows(problem: Problem) -> str | None:
    return "for dense weights" if problem.fp8 else _not_rows(problem)


def _not_fp8_rows(problem: Problem) -> str | None:
    return _not_rows(problem) if problem.fp8 else "for 8-bit floats with scales for 128 by 128"


def _rows(operands: Operands, tile: GroupTile) -> torch.Tensor:
    assert isinstance(operands.weight, Dense)
    return group_rows(operands.workspace, operands.x, operands.weight.data, tile)


def _fp8_rows(operands: Operands, tile: GroupTile) -> torch.Tensor:
    assert isinstance(operands.weight, Fp8)
    return group_fp8(operands.workspace, operands.x, operands.weight, tile)


def _written_out(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, weight, deterministic = operands
    assert isinstance(weight, Fp8)
    return grouped(workspace, x, Dense(written_out(workspace, weight, x.dtype)), deterministic)


def _library(operands: Operands, _: Any = None) -> torch.Tensor:
    assert isinstance(operands.weight, Dense)
    return library(operands.x, operands.weight.data)


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "fp8_rows",
            _not_fp8_rows,
            fp8_tile,
            _fp8_rows,
            "docs/experiments/2026-11-29-launches-of-deepseek-v4.md",
        ),
        Variant(
            "written_out",
            lambda problem: None if problem.fp8 else "for 8-bit floats",
            lambda problem: None,
            _written_out,
            "docs/experiments/2026-11-29-launches-of-deepseek-v4.md",
        ),
        Variant(
            "rows",
            _not_dense_rows,
            tile,
            _rows,
            "docs/experiments/2026-11-20-recurrent-and-compressed.md",
        ),
        Variant(
            "library",
            lambda problem: None,
            lambda problem: None,
            _library,
            "what nothing else takes; docs/experiments/2026-11-20-recurrent-and-compressed.md",
        ),
    ]
)


def grouped(workspace: Workspace, x: torch.Tensor, weight: Dense | Fp8, deterministic: bool) -> torch.Tensor:
    """The product by the launches that are chosen; x is contiguous."""
    fp8 = isinstance(weight, Fp8)
    problem = Problem(len(x), weight.shape[-1], x.dtype, fp8, deterministic)
    choice = DISPATCH.choose(problem)
    y: torch.Tensor = choice.launch(Operands(workspace, x, weight, deterministic), choice.config)
    return y
