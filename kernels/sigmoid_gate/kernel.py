"""A gate on the output of attention: one program a token and a tile of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv
from kernels.workspace import Workspace


@triton.jit
def _gate(x, gate, out, n, x_stride, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    f = tl.load(x + t * x_stride + i, mask=i < n, other=0.0).to(tl.float32)
    g = tl.load(gate + t * gate_stride + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + t * n + i, (f / (1.0 + tl.exp(-g))).to(out.dtype.element_ty), mask=i < n)


def sigmoid_gate(workspace: Workspace, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See the reference. The last axes are dense."""
    t, n = x.shape
    out = torch.empty(t, n, dtype=x.dtype, device=x.device)
    if t:
        pdl = workspace.pdl
        workspace.launch(_gate, (t, cdiv(n, 1024)))(
            x, gate, out, n, x.stride(0), gate.stride(0), BLOCK=1024, PDL=pdl, launch_pdl=pdl
        )
    return out
