"""Gated activation in Triton (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gated_activation.reference import is_silu
from kernels.sizes import cdiv
from kernels.workspace import Workspace

_BLOCK = 1024


@triton.jit
def gated(gate, up, limit, IS_SILU: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """act(gate) · up in float32; HAS_LIMIT clips the gate above and up on both sides first."""
    g = gate.to(tl.float32)
    up = up.to(tl.float32)
    if HAS_LIMIT:
        g = tl.minimum(g, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if IS_SILU:
        act = g * tl.sigmoid(g)
    else:
        act = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return act * up


@triton.jit
def _gate(
    p_x,
    p_y,
    F,
    x_stride,
    limit,
    IS_SILU: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < F
    p_gate = p_x + i_token * x_stride + columns
    gate = tl.load(p_gate, mask=m_columns, other=0.0)
    up = tl.load(p_gate + F, mask=m_columns, other=0.0)
    act = gated(gate, up, limit, IS_SILU, HAS_LIMIT)
    tl.store(p_y + i_token * F + columns, act.to(gate.dtype), mask=m_columns)


def gated_activation(
    workspace: Workspace, x: torch.Tensor, activation: str = "silu", limit: float | None = None
) -> torch.Tensor:
    """y = act(x[:, :F]) * x[:, F:], in float32, rounded once. A limit clips gate above and up on both sides first.

    silu(g) = g·σ(g);  gelu_tanh(g) = ½g(1 + tanh u) = g·σ(2u) with u = √(2/π)(g + 0.044715 g³).
    Shapes as in the reference; x's rows may be strided. Raises ValueError for another activation.
    """
    silu = is_silu(activation)
    tokens, channels = x.shape[0], x.shape[1] // 2
    y = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens:
        pdl = workspace.pdl
        workspace.launch(_gate, (tokens, cdiv(channels, _BLOCK)))(
            x,
            y,
            channels,
            x.stride(0),
            limit if limit is not None else 0.0,
            IS_SILU=silu,
            HAS_LIMIT=limit is not None,
            BLOCK=_BLOCK,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return y
