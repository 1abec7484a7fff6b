"""Gated delta rule: a program carries a slice of one head's state through a line, a token or a chunk at a time.

Columns of the state never mix, so a head is cut into slices of values. Within a chunk the writes solve a unit lower
triangular system, inverted row by row in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _softplus(x):
    return tl.where(x < -15.0, tl.exp(x), tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit(do_not_specialize=["first_line"])
def _delta(
    qkv,
    a,
    b,
    a_log,
    dt_bias,
    state,
    state_slots,
    query_start,
    context_len,
    out,
    first_line,
    qkv_stride,
    a_stride,
    b_stride,
    slot_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    line = first_line + tl.program_id(0)
    head = tl.program_id(1)
    lo = tl.load(query_start + line).to(tl.int64)
    count = tl.load(query_start + line + 1) - lo
    if count <= 0:
        return
    k_i = tl.arange(0, BLOCK_K)
    v_i = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_head = head // (HEADS // KEY_HEADS)
    q_col = key_head * DK + k_i
    k_col = KEY_HEADS * DK + q_col
    v_col = 2 * KEY_HEADS * DK + head * DV + v_i
    where = state + tl.load(state_slots + line) * slot_stride + head * DK * DV + k_i[:, None] * DV + v_i[None]
    inside = (k_i < DK)[:, None] & (v_i < DV)[None]
    known = tl.where(tl.load(context_len + line) > count, DK, 0)
    s = tl.load(where, mask=inside & (k_i < known)[:, None], other=0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)

    if CHUNK == 1:
        row = qkv + lo * qkv_stride
        q = tl.load(row + q_col, mask=k_i < DK, other=0.0).to(tl.float32)
        k = tl.load(row + k_col, mask=k_i < DK, other=0.0).to(tl.float32)
        v = tl.load(row + v_col, mask=v_i < DV, other=0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        g = rate * _softplus(tl.load(a + lo * a_stride + head).to(tl.float32) + shift)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + lo * b_stride + head).to(tl.float32)))
        s = s * tl.exp(g)
        u = beta * (v - tl.sum(s * k[:, None], 0))
        s += k[:, None] * u[None]
        o = tl.sum(s * q[:, None], 0)
        tl.store(out + (lo * HEADS + head) * DV + v_i, o.to(out.dtype.element_ty), mask=v_i < DV)
    else:
        c = tl.arange(0, CHUNK)
        lower = c[:, None] > c[None]
        for first in range(0, count, CHUNK):
            live = first + c < count
            token = lo + first + c
            row = qkv + token[:, None] * qkv_stride
            key_mask = live[:, None] & (k_i < DK)[None]
            q = _unit(tl.load(row + q_col[None], mask=key_mask, other=0.0).to(tl.float32)) * DK**-0.5
            k = _unit(tl.load(row + k_col[None], mask=key_mask, other=0.0).to(tl.float32))
            v = tl.load(row + v_col[None], mask=live[:, None] & (v_i < DV)[None], other=0.0).to(tl.float32)
            raw = tl.load(a + token * a_stride + head, mask=live, other=0.0).to(tl.float32)
            g = tl.where(live, rate * _softplus(raw + shift), 0.0)
            gate = tl.load(b + token * b_stride + head, mask=live, other=0.0).to(tl.float32)
            beta = tl.where(live, 1.0 / (1.0 + tl.exp(-gate)), 0.0)
            total = tl.cumsum(g, 0)
            fall = tl.where(lower | (c[:, None] == c[None]), total[:, None] - total[None], float("-inf"))
            decay = tl.exp(fall)
            kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            system = tl.where(lower, beta[:, None] * kk * decay, 0.0)
            # inverse of 1 + system: row i of it is eᵢ − Σ_{j<i} systemᵢⱼ rowⱼ
            inverse = tl.where(c[:, None] == c[None], 1.0, 0.0)
            for i in range(1, CHUNK):
                picked = tl.sum(tl.where(c[:, None] == i, system, 0.0), 0)
                fresh = tl.where(c == i, 1.0, 0.0) - tl.sum(picked[:, None] * inverse, 0)
                inverse = tl.where(c[:, None] == i, fresh[None], inverse)
            grown = tl.exp(total)[:, None]
            wanted = beta[:, None] * (v - grown * tl.dot(k, s, input_precision=PRECISION))
            u = tl.dot(inverse, wanted, input_precision=PRECISION)
            o = grown * tl.dot(q, s, input_precision=PRECISION)
            o += tl.dot(tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay, u, input_precision=PRECISION)
            place = (token[:, None] * HEADS + head) * DV + v_i[None]
            tl.store(out + place, o.to(out.dtype.element_ty), mask=live[:, None] & (v_i < DV)[None])
            end = tl.sum(g, 0)
            s = s * tl.exp(end)
            s += tl.dot(tl.trans(k * tl.exp(end - total)[:, None]), u, input_precision=PRECISION)
    tl.store(where, s, mask=inside)


def gated_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_key_heads: int,
    num_single: int,
    max_query: int,
) -> torch.Tensor:
    """See the reference. The last axes of qkv, a and b, and a slot of the state, are dense."""
    _, heads, dk, dv = state.shape
    lines = context_len.shape[0]
    out = torch.empty(qkv.shape[0], heads, dv, dtype=qkv.dtype, device=qkv.device)

    def launch(first: int, count: int, chunk: int, block_v: int) -> None:
        _delta[(count, heads, triton.cdiv(dv, block_v))](
            qkv,
            a,
            b,
            a_log,
            dt_bias,
            state,
            state_slots,
            query_start,
            context_len,
            out,
            first,
            qkv.stride(0),
            a.stride(0),
            b.stride(0),
            state.stride(0),
            KEY_HEADS=num_key_heads,
            HEADS=heads,
            DK=dk,
            DV=dv,
            BLOCK_K=max(16, triton.next_power_of_2(dk)),
            BLOCK_V=block_v,
            CHUNK=chunk,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=4,
        )

    if num_single:
        launch(0, num_single, 1, min(32, triton.next_power_of_2(dv)))
    if lines > num_single:
        # Chunks of 16: with a state of 128 × 32 beside them, longer ones no longer fit the registers.
        launch(num_single, lines - num_single, 16, max(16, min(32, triton.next_power_of_2(dv))))
    return out
