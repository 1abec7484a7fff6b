# mypy: disable-error-code="no-untyped-def"
"""A matrix product for each group of channels: few rows read each weight once, many go to cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

FEW_ROWS = 64
OUTPUTS, INPUTS, STAGES = 32, 256, 4


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


def group_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, deterministic: bool = False
) -> torch.Tensor:
    """See the reference. x is dense, and so is each group of weight."""
    groups, outputs, size = weight.shape
    rows = x.shape[0]
    x = x.contiguous()
    if rows > FEW_ROWS and not deterministic:
        grouped = x.view(rows, groups, size).transpose(0, 1)
        return torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1).flatten(1)
    y = torch.empty(rows, groups * outputs, dtype=x.dtype, device=x.device)
    if rows:
        pdl = workspace.pdl
        exact = x.dtype == torch.float32
        block_t = 16 if rows <= 16 and not deterministic else 64
        workspace.launch(_group, (cdiv(outputs, OUTPUTS), groups, cdiv(rows, block_t)))(
            x,
            weight,
            y,
            rows,
            groups,
            outputs,
            size,
            weight.stride(0),
            BLOCK_T=block_t,
            BLOCK_N=OUTPUTS,
            BLOCK_K=64 if exact else min(INPUTS if block_t == 16 else INPUTS // 2, next_power_of_2(size)),
            STAGES=2 if exact else STAGES,
            PRECISION="tf32x3" if exact else "tf32",
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
    return y
