"""RMS norm of each head, times an activated gate: one program a head of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(x, gate, weight, out, gate_stride, eps, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    live = i < DIM
    row = (t * HEADS + head) * DIM + i
    f = tl.load(x + row, mask=live, other=0.0).to(tl.float32)
    g = tl.load(gate + t * gate_stride + head * DIM + i, mask=live, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=live, other=0.0).to(tl.float32)
    f = f * tl.rsqrt(tl.sum(f * f, 0) / DIM + eps) * w * (g / (1.0 + tl.exp(-g)))
    tl.store(out + row, f.to(out.dtype.element_ty), mask=live)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the reference. The last axis of gate is dense."""
    t, heads, dim = x.shape
    x = x.contiguous()
    out = torch.empty(t, heads * dim, dtype=x.dtype, device=x.device)
    if t:
        _norm[(t, heads)](
            x,
            gate,
            weight,
            out,
            gate.stride(0),
            eps,
            HEADS=heads,
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=1,
        )
    return out
