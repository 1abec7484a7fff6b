# mypy: disable-error-code="no-untyped-def"
"""One token a sequence through the gated delta rule, behind its convolution when asked for.

A program holds a slice of one head's state of one sequence in registers. The state, the taps and the kept inputs were
written by an earlier step, so they are on their way before the kernel ahead of this one has finished.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Values of a slice, for few programs and for many: narrow ones fill the machine, wide ones convolve keys less often.
NARROW, WIDE, WARPS = 32, 64, 4


@triton.jit
def softplus(x):
    return tl.where(x < -15.0, tl.exp(x), tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def one_token(s, q, k, v, g, beta, DK: tl.constexpr):
    """The state behind a token, and what it gives: with q and k of length 1, S ← eᵍ S + k ⊗ u and qᵀS."""
    q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    s = s * tl.exp(g)
    u = beta * (v - tl.sum(s * k[:, None], 0))
    # From the old state, so that both sums over keys run at once.
    o = tl.sum(s * q[:, None], 0) + tl.sum(q * k, 0) * u
    return s + k[:, None] * u[None], o


@triton.jit
def _kept(inputs, conv, c, live, p, channels, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """What the inputs before position p add to its convolution, a channel at a time."""
    y = tl.zeros(c.shape, tl.float32)
    for w in tl.static_range(WIDTH - 1):
        before = p - (WIDTH - 1) + w
        bound = tl.where(before >= 0, channels, 0)
        v = tl.load(inputs + (before + PLACES) % PLACES * channels + c, mask=live & (c < bound), other=0.0).to(
            tl.float32
        )
        y += v * tl.load(conv + c * WIDTH + w, mask=live, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize_on_alignment=["state_slots", "query_start", "context_len"])
def _step(
    x,
    a,
    b,
    conv,
    inputs,
    a_log,
    dt_bias,
    state,
    state_slots,
    query_start,
    context_len,
    out,
    x_stride,
    a_stride,
    b_stride,
    input_stride,
    slot_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CONV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + seq).to(tl.int64)
    length = tl.load(context_len + seq)
    slot = tl.load(state_slots + seq)
    k_i = tl.arange(0, BLOCK_K)
    v_i = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = k_i < DK
    m_v = v_i < DV
    key_head = head // (HEADS // KEY_HEADS)
    q_c = key_head * DK + k_i
    k_c = KEY_HEADS * DK + q_c
    v_c = 2 * KEY_HEADS * DK + head * DV + v_i
    channels: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    p_state = state + slot * slot_stride + head * DK * DV + k_i[:, None] * DV + v_i[None]
    inside = m_k[:, None] & m_v[None]
    known = tl.where(length > 1, DK, 0)
    s = tl.load(p_state, mask=(k_i < known)[:, None] & m_v[None], other=0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    if CONV:
        p_inputs = inputs + slot * input_stride
        q_y = _kept(p_inputs, conv, q_c, m_k, length - 1, channels, WIDTH, PLACES)
        k_y = _kept(p_inputs, conv, k_c, m_k, length - 1, channels, WIDTH, PLACES)
        v_y = _kept(p_inputs, conv, v_c, m_v, length - 1, channels, WIDTH, PLACES)
        q_tap = tl.load(conv + q_c * WIDTH + (WIDTH - 1), mask=m_k, other=0.0).to(tl.float32)
        k_tap = tl.load(conv + k_c * WIDTH + (WIDTH - 1), mask=m_k, other=0.0).to(tl.float32)
        v_tap = tl.load(conv + v_c * WIDTH + (WIDTH - 1), mask=m_v, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    row = x + token * x_stride
    q_x = tl.load(row + q_c, mask=m_k, other=0.0)
    k_x = tl.load(row + k_c, mask=m_k, other=0.0)
    v_x = tl.load(row + v_c, mask=m_v, other=0.0)
    g = rate * softplus(tl.load(a + token * a_stride + head).to(tl.float32) + shift)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
    q = q_x.to(tl.float32)
    k = k_x.to(tl.float32)
    v = v_x.to(tl.float32)
    if CONV:
        # No program of this step reads the place that the new inputs go to.
        place = p_inputs + (length - 1) % PLACES * channels
        first = (head % (HEADS // KEY_HEADS) == 0) & (tl.program_id(2) == 0)
        if first:
            tl.store(place + q_c, q_x.to(inputs.dtype.element_ty), mask=m_k)
            tl.store(place + k_c, k_x.to(inputs.dtype.element_ty), mask=m_k)
        tl.store(place + v_c, v_x.to(inputs.dtype.element_ty), mask=m_v)
        q = q_y + q_tap * q
        k = k_y + k_tap * k
        v = v_y + v_tap * v
        q = q / (1.0 + tl.exp(-q))
        k = k / (1.0 + tl.exp(-k))
        v = v / (1.0 + tl.exp(-v))
    s, o = one_token(s, q, k, v, g, beta, DK)
    tl.store(p_state, s, mask=inside)
    tl.store(out + (token * HEADS + head) * DV + v_i, o.to(out.dtype.element_ty), mask=m_v)


def step_seqs(
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
    count: int,
    out: torch.Tensor,
    conv: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """The first `count` sequences, of one token each, into their rows of `out` [T, H·Dv].

    conv is the weight [C, W] and the kept inputs [S, R, C] of a convolution that comes before; x is its input then.
    """
    _, heads, dk, dv = state.shape
    weight, inputs = (x, x) if conv is None else conv
    block_v = NARROW if count * heads < 4 * multiprocessors(x.device) else WIDE
    block_v = min(block_v, next_power_of_2(dv))
    pdl = workspace.pdl
    workspace.launch(_step, (count, heads, cdiv(dv, block_v)))(
        x,
        a,
        b,
        weight,
        inputs,
        a_log,
        dt_bias,
        state,
        state_slots,
        query_start,
        context_len,
        out,
        x.stride(0),
        a.stride(0),
        b.stride(0),
        inputs.stride(0),
        state.stride(0),
        KEY_HEADS=num_key_heads,
        HEADS=heads,
        DK=dk,
        DV=dv,
        WIDTH=weight.shape[1] if conv is not None else 1,
        PLACES=inputs.shape[1],
        CONV=conv is not None,
        BLOCK_K=max(16, next_power_of_2(dk)),
        BLOCK_V=block_v,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=WARPS,
    )
