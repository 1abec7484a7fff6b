# mypy: disable-error-code="no-untyped-def"
"""The gated delta rule a token at a time, however many a sequence has: what a token gives does not hang on where chunks
of its sequence begin, nor on what stands beside it.

A program is one warp. It holds a slice of one head's state of one sequence in registers and walks the sequence's
tokens: sums over keys need no other warp. A slice has the same size in every launch, so that sums have one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gated_delta.step import one_token, softplus
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Values of a slice: 64 bytes of each key's row.
SLICE = 16


@triton.jit(do_not_specialize_on_alignment=["state_slots", "query_start", "context_len", "kept"])
def _recurrent(
    x,
    a,
    b,
    a_log,
    dt_bias,
    state,
    state_slots,
    query_start,
    context_len,
    kept,
    out,
    x_stride,
    a_stride,
    b_stride,
    slot_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEPT: tl.constexpr,
    OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # Slices of one head's state stand beside each other in memory: their programs start together.
    seq = tl.program_id(2)
    head = tl.program_id(1)
    lo = tl.load(query_start + seq).to(tl.int64)
    count = (tl.load(query_start + seq + 1) - lo).to(tl.int32)
    length = tl.load(context_len + seq)
    k_i = tl.arange(0, BLOCK_K)
    v_i = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = k_i < DK
    m_v = v_i < DV
    p_q = x + lo * x_stride + head // (HEADS // KEY_HEADS) * DK + k_i
    p_k = p_q + KEY_HEADS * DK
    p_v = x + lo * x_stride + 2 * KEY_HEADS * DK + head * DV + v_i
    p_state = state + tl.load(state_slots + seq) * slot_stride + head * DK * DV + k_i[:, None] * DV + v_i[None]
    inside = m_k[:, None] & m_v[None]
    known = tl.where(length > count, DK, 0)
    # Written by an earlier step.
    s = tl.load(p_state, mask=(k_i < known)[:, None] & m_v[None], other=0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        gdc_wait()
    stop = tl.load(kept + seq) if KEPT else count
    if not OUT:
        count = tl.minimum(count, stop)
    if count <= 0:
        return
    # A token's inputs are on their way while the one before it is worked on.
    q_x = tl.load(p_q, mask=m_k, other=0.0)
    k_x = tl.load(p_k, mask=m_k, other=0.0)
    v_x = tl.load(p_v, mask=m_v, other=0.0)
    a_x = tl.load(a + lo * a_stride + head)
    b_x = tl.load(b + lo * b_stride + head)
    for i in range(0, count):
        q = q_x.to(tl.float32)
        k = k_x.to(tl.float32)
        v = v_x.to(tl.float32)
        g = rate * softplus(a_x.to(tl.float32) + shift)
        beta = 1.0 / (1.0 + tl.exp(-b_x.to(tl.float32)))
        following = tl.minimum(i + 1, count - 1).to(tl.int64)
        q_x = tl.load(p_q + following * x_stride, mask=m_k, other=0.0)
        k_x = tl.load(p_k + following * x_stride, mask=m_k, other=0.0)
        v_x = tl.load(p_v + following * x_stride, mask=m_v, other=0.0)
        a_x = tl.load(a + (lo + following) * a_stride + head)
        b_x = tl.load(b + (lo + following) * b_stride + head)
        s, o = one_token(s, q, k, v, g, beta, DK)
        if OUT:
            tl.store(out + ((lo + i) * HEADS + head) * DV + v_i, o.to(out.dtype.element_ty), mask=m_v)
        if KEPT and OUT:
            live = tl.where(i + 1 == stop, DK, 0)
            tl.store(p_state, s, mask=(k_i < live)[:, None] & m_v[None])
    if not (KEPT and OUT):
        tl.store(p_state, s, mask=inside)


def recurrent_seqs(
    workspace: Workspace,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_key_heads: int,
    out: torch.Tensor | None,
    kept: torch.Tensor | None = None,
) -> None:
    """All sequences of `gated_delta` into `out` [T, H, Dv]; without it only states are brought up."""
    _, heads, dk, dv = state.shape
    block_v = min(SLICE, next_power_of_2(dv))
    pdl = workspace.pdl
    workspace.launch(_recurrent, (cdiv(dv, block_v), heads, len(context_len)))(
        x, a, b, a_log, dt_bias, state, state_slots, query_start, context_len,
        context_len if kept is None else kept, x if out is None else out, x.stride(0), a.stride(0),
        b.stride(0), state.stride(0), KEY_HEADS=num_key_heads, HEADS=heads, DK=dk, DV=dv,
        BLOCK_K=max(16, next_power_of_2(dk)), BLOCK_V=block_v, KEPT=kept is not None,
        OUT=out is not None, PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip
