"""From the output of a layer part to residual streams: one program a token and a tile of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace


@triton.jit
def _merge(
    x, streams, post, comb, out, hidden, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, BLOCK_N)
    m_n = n < N
    live = i < hidden
    if PDL:
        gdc_wait()
    v = tl.load(x + t * hidden + i, mask=live, other=0.0).to(tl.float32)
    y = tl.load(post + t * N + n, mask=m_n, other=0.0)[:, None] * v[None]
    for j in tl.static_range(N):
        old = tl.load(streams + (t * N + j) * hidden + i, mask=live, other=0.0).to(tl.float32)
        y += tl.load(comb + (t * N + j) * N + n, mask=m_n, other=0.0)[:, None] * old[None]
    place = out + (t * N + n)[:, None] * hidden + i[None]
    tl.store(place, y.to(out.dtype.element_ty), mask=m_n[:, None] & live[None])


def hyper_merge(
    workspace: Workspace, x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """See the reference."""
    t, n, hidden = streams.shape
    streams = streams.contiguous()
    out = torch.empty_like(streams)
    if t:
        pdl = workspace.pdl
        block = min(1024, next_power_of_2(hidden))
        workspace.launch(_merge, (t, cdiv(hidden, block)))(
            x.contiguous(),
            streams,
            post.contiguous(),
            comb.contiguous(),
            out,
            hidden,
            N=n,
            BLOCK_N=next_power_of_2(n),
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
        )
    return out
