# mypy: disable-error-code="no-untyped-def"
"""Products for each group of channels with dense weights: few rows read each weight once, many go to cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv
from kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class GroupTile:
    """Rows and outputs of a program, inputs of a stage, stages where they fit."""

    rows: int
    outputs: int
    inputs: int
    stages: int

    def grid(self, rows: int, groups: int, outputs: int) -> tuple[int, int, int]:
        """Of so many rows, and outputs a group."""
        return cdiv(outputs, self.outputs), groups, cdiv(rows, self.rows)


@triton.jit(do_not_specialize=["rows"])
def _group(
    x,
    weight,
    y,
    rows,
    groups,
    outputs,
    size,
    group_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    group = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    m_n = n < outputs
    m_t = t < rows
    source = weight + group.to(tl.int64) * group_stride + n.to(tl.int64)[:, None] * size + k[None]
    row = x + (t.to(tl.int64) * groups + group)[:, None] * size + k[None]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    if PDL:
        gdc_wait()
    for first in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        inside = (first + k < size)[None]
        w = tl.load(source + first, mask=m_n[:, None] & inside, other=0.0)
        v = tl.load(row + first, mask=m_t[:, None] & inside, other=0.0)
        acc = tl.dot(v, tl.trans(w), acc, input_precision=PRECISION)
    place = y + (t.to(tl.int64) * groups + group)[:, None] * outputs + n[None]
    tl.store(place, acc.to(y.dtype.element_ty), mask=m_t[:, None] & m_n[None])


def group_rows(workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, tile: GroupTile) -> torch.Tensor:
    """`group_linear` of x [T, G·K], which is contiguous, and weight [G, R, K], each of whose groups is."""
    groups, outputs, size = weight.shape
    rows = len(x)
    y = torch.empty(rows, groups * outputs, dtype=x.dtype, device=x.device)
    if rows:
        workspace.launch(_group, tile.grid(rows, groups, outputs))(
            x,
            weight,
            y,
            rows,
            groups,
            outputs,
            size,
            weight.stride(0),
            BLOCK_T=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.inputs,
            STAGES=tile.stages,
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
            PDL=workspace.pdl,
            launch_pdl=workspace.pdl,
            num_warps=4,
        )
    return y


def library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`group_linear` by cuBLAS."""
    groups, _, size = weight.shape
    grouped = x.view(len(x), groups, size).transpose(0, 1)
    return torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1).flatten(1)
