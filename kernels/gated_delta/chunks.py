# mypy: disable-error-code="no-untyped-def"
"""Many tokens a sequence through the gated delta rule, in chunks (Yang et al. 2024, arXiv:2412.06464, §3.3).

`_prepare` takes every chunk of every head at once: with A the strictly lower part of βᵢ e^{Gᵢ−Gⱼ} kᵢ·kⱼ it inverts
1 + A and gives u = (1 + A)⁻¹ βv, w = (1 + A)⁻¹ β e^G k and the scores of the chunk's own tokens. `_carry` then walks
each sequence with a slice of the state: fresh = u − wS, o = e^G qS + scores · fresh, S ← e^{G_C} S + (e^{G_C−G} k)ᵀ
fresh.

Queries and keys enter the products as they are stored, so that these round nothing; their lengths, the decays and β are
factors on rows and columns, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gated_delta.step import softplus
from kernels.hardware import large_shared_memory, multiprocessors
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

CHUNK = 64
# Diagonal blocks that are inverted row by row; four of them make a chunk.
CORNER = 16
PREPARE_WARPS, CARRY_WARPS = 4, 4
# Triton 3.6 gives wrong code for one stage of 16-bit operands.
CARRY_STAGES, SMALL_STAGES, EXACT_STAGES = 3, 2, 1


@triton.jit
def _inverse(system, transposed, CHUNK: tl.constexpr, CORNER: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)⁻¹ of a strictly lower triangular [CHUNK, CHUNK]; `transposed` is its transpose.

    The corners on the diagonal by forward substitution, all at once. With D their inverse and R what is below them,
    N = D·R has N⁴ = 0, so (1 + system)⁻¹ = (1 + N)⁻¹ D = (1 − N + N² − N³) D.
    """
    corners: tl.constexpr = CHUNK // CORNER
    c = tl.arange(0, CHUNK)
    i = tl.arange(0, CORNER)
    same = c[:, None] // CORNER == c[None] // CORNER
    small = tl.reshape(tl.where(same, transposed, 0.0), (CHUNK, corners, CORNER))
    small = tl.reshape(tl.sum(small, 1), (corners, CORNER, CORNER))
    one = tl.where(i[:, None] == i[None], 1.0, 0.0)[None]
    inverse = one + tl.zeros((corners, CORNER, CORNER), tl.float32)
    for row in range(1, CORNER):
        # row r of the inverse is eᵣ − Σ_{j<r} systemᵣⱼ rowⱼ
        picked = tl.sum(tl.where(i[None, None, :] == row, small, 0.0), 2)
        fresh = tl.where(i == row, 1.0, 0.0)[None] - tl.sum(picked[:, :, None] * inverse, 1)
        inverse = tl.where(i[None, :, None] == row, fresh[:, None, :], inverse)
    wide = tl.broadcast_to(tl.reshape(inverse, (CHUNK, 1, CORNER)), (CHUNK, corners, CORNER))
    wide = tl.where(same, tl.reshape(wide, (CHUNK, CHUNK)), 0.0)
    n = tl.dot(wide, tl.where(same, 0.0, system), input_precision=PRECISION)
    n2 = tl.dot(n, n, input_precision=PRECISION)
    return wide + tl.dot(n2 - n - tl.dot(n2, n, input_precision=PRECISION), wide, input_precision=PRECISION)


@triton.jit(do_not_specialize=["first_seq", "tokens"], do_not_specialize_on_alignment=["query_start"])
def _prepare(
    qkv,
    a,
    b,
    a_log,
    dt_bias,
    query_start,
    scores,
    w_out,
    u_out,
    factors,
    first_seq,
    tokens,
    qkv_stride,
    a_stride,
    b_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    CORNER: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    seq = first_seq + tl.program_id(2)
    head = tl.program_id(1)
    lo = tl.load(query_start + seq).to(tl.int64)
    count = tl.load(query_start + seq + 1) - lo
    first = tl.program_id(0) * CHUNK
    if first >= count:
        return
    c = tl.arange(0, CHUNK)
    k_i = tl.arange(0, BLOCK_K)
    v_i = tl.arange(0, BLOCK_V)
    live = first + c < count
    token = lo + first + c
    m_key = live[:, None] & (k_i < DK)[None]
    m_value = live[:, None] & (v_i < DV)[None]
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    p_q = qkv + token[:, None] * qkv_stride + (head // (HEADS // KEY_HEADS)) * DK + k_i[None]
    if PDL:
        gdc_wait()

    q = tl.load(p_q, mask=m_key, other=0.0)
    k = tl.load(p_q + KEY_HEADS * DK, mask=m_key, other=0.0)
    p_v = qkv + token[:, None] * qkv_stride + 2 * KEY_HEADS * DK + head * DV + v_i[None]
    v = tl.load(p_v, mask=m_value, other=0.0)
    raw = tl.load(a + token * a_stride + head, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(b + token * b_stride + head, mask=live, other=0.0).to(tl.float32)
    g = tl.where(live, rate * softplus(raw + shift), 0.0)
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-gate)), 0.0)
    q_f = q.to(tl.float32)
    k_f = k.to(tl.float32)
    q_unit = tl.rsqrt(tl.sum(q_f * q_f, 1) + 1e-6) * DK**-0.5
    k_unit = tl.rsqrt(tl.sum(k_f * k_f, 1) + 1e-6)
    total = tl.cumsum(g, 0)
    end = tl.sum(g, 0)

    lower = c[:, None] > c[None]
    upper = c[:, None] < c[None]
    fall = total[:, None] - total[None]
    # e^{Gᵢ−Gⱼ} for i ≥ j, and e^{Gⱼ−Gᵢ} above the diagonal: never above 1
    decay = tl.exp(tl.where(upper, -fall, fall))
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * k_unit[:, None] * k_unit[None] * decay
    inverse = _inverse(
        tl.where(lower, beta[:, None] * kk, 0.0), tl.where(upper, beta[None] * kk, 0.0), CHUNK, CORNER, PRECISION
    )
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_unit[:, None] * k_unit[None] * decay
    row = token * HEADS + head
    tl.store(
        scores + row[:, None] * CHUNK + c[None],
        tl.where(upper, 0.0, qk).to(scores.dtype.element_ty),
        mask=live[:, None] & (c >= 0)[None],
    )
    to_keys = (inverse * (beta * tl.exp(total) * k_unit)[None]).to(qkv.dtype.element_ty)
    w = tl.dot(to_keys, k, input_precision=PRECISION)
    tl.store(w_out + row[:, None] * DK + k_i[None], w.to(w_out.dtype.element_ty), mask=m_key)
    u = tl.dot((inverse * beta[None]).to(qkv.dtype.element_ty), v, input_precision=PRECISION)
    tl.store(u_out + row[:, None] * DV + v_i[None], u.to(u_out.dtype.element_ty), mask=m_value)
    place = factors + head * tokens.to(tl.int64) + token
    third = HEADS * tokens.to(tl.int64)
    tl.store(place, q_unit * tl.exp(total), mask=live)
    tl.store(place + third, k_unit * tl.exp(end - total), mask=live)
    tl.store(place + 2 * third, tl.exp(tl.where(live, end, 0.0)), mask=live)


@triton.jit(
    do_not_specialize=["first_seq", "tokens"],
    do_not_specialize_on_alignment=["state_slots", "query_start", "context_len"],
)
def _carry(
    qkv,
    scores,
    w_in,
    u_in,
    factors,
    state,
    state_slots,
    query_start,
    context_len,
    out,
    first_seq,
    tokens,
    qkv_stride,
    slot_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    seq = first_seq + tl.program_id(2)
    head = tl.program_id(1)
    lo = tl.load(query_start + seq).to(tl.int64)
    count = (tl.load(query_start + seq + 1) - lo).to(tl.int32)
    if count <= 0:
        return
    c = tl.arange(0, CHUNK)
    k_i = tl.arange(0, BLOCK_K)
    v_i = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = (k_i < DK)[None]
    m_v = (v_i < DV)[None]
    p_state = state + tl.load(state_slots + seq) * slot_stride + head * DK * DV + k_i[:, None] * DV + v_i[None]
    inside = (k_i < DK)[:, None] & m_v
    known = tl.where(tl.load(context_len + seq) > count, DK, 0)
    s = tl.load(p_state, mask=(k_i < known)[:, None] & m_v, other=0.0)
    p_q = qkv + (lo + c)[:, None] * qkv_stride + (head // (HEADS // KEY_HEADS)) * DK + k_i[None]
    row = (lo + c)[:, None] * HEADS + head
    p_scores = scores + row * CHUNK + c[None]
    p_w = w_in + row * DK + k_i[None]
    p_u = u_in + row * DV + v_i[None]
    p_out = out + row * DV + v_i[None]
    p_factors = factors + head * tokens.to(tl.int64) + lo
    third = HEADS * tokens.to(tl.int64)
    if PDL:
        gdc_wait()

    q_factor = tl.load(p_factors + c, mask=c < count, other=0.0)
    k_factor = tl.load(p_factors + third + c, mask=c < count, other=0.0)
    decay = tl.load(p_factors + 2 * third)
    for first in tl.range(0, count, CHUNK, num_stages=STAGES):
        live = (first + c < count)[:, None]
        w = tl.load(p_w + first * (HEADS * DK), mask=live & m_k, other=0.0)
        u = tl.load(p_u + first * (HEADS * DV), mask=live & m_v, other=0.0)
        q = tl.load(p_q + first * qkv_stride, mask=live & m_k, other=0.0)
        k = tl.load(p_q + first * qkv_stride + KEY_HEADS * DK, mask=live & m_k, other=0.0)
        near = tl.load(p_scores + first * (HEADS * CHUNK), mask=live & (c >= 0)[None], other=0.0)
        # the next chunk's factors are on their way while this one's are used
        ahead = first + CHUNK + c
        q_next = tl.load(p_factors + ahead, mask=ahead < count, other=0.0)
        k_next = tl.load(p_factors + third + ahead, mask=ahead < count, other=0.0)
        decay_next = tl.load(p_factors + 2 * third + tl.minimum(first + CHUNK, count - 1))
        held = s.to(qkv.dtype.element_ty)
        fresh = u.to(tl.float32) - tl.dot(w, held, input_precision=PRECISION)
        o = tl.dot(q, held, input_precision=PRECISION) * q_factor[:, None]
        o = tl.dot(near, fresh.to(qkv.dtype.element_ty), o, input_precision=PRECISION)
        tl.store(p_out + first * (HEADS * DV), o.to(out.dtype.element_ty), mask=live & m_v)
        scaled = (fresh * k_factor[:, None]).to(qkv.dtype.element_ty)
        s = tl.dot(tl.trans(k), scaled, s * decay, input_precision=PRECISION)
        q_factor = q_next
        k_factor = k_next
        decay = decay_next
    tl.store(p_state, s, mask=inside)


def chunk_seqs(
    workspace: Workspace,
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
    first: int,
    stop: int,
    longest: int,
    out: torch.Tensor,
) -> None:
    """Sequences first … stop − 1, each of at most `longest` tokens, into their rows of `out` [T, H·Dv]."""
    tokens = qkv.shape[0]
    _, heads, dk, dv = state.shape
    seqs = stop - first
    pdl = workspace.pdl
    scores = torch.empty(tokens, heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    w = torch.empty(tokens, heads, dk, dtype=qkv.dtype, device=qkv.device)
    u = torch.empty(tokens, heads, dv, dtype=qkv.dtype, device=qkv.device)
    factors = torch.empty(3, heads, tokens, dtype=torch.float32, device=qkv.device)
    exact = qkv.dtype == torch.float32
    sizes = {"KEY_HEADS": num_key_heads, "HEADS": heads, "DK": dk, "DV": dv}
    tiles = {
        "BLOCK_K": max(16, next_power_of_2(dk)),
        "CHUNK": CHUNK,
        "PRECISION": "tf32x3" if exact else "tf32",
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    wide = max(16, next_power_of_2(dv))
    workspace.launch(_prepare, (cdiv(longest, CHUNK), heads, seqs))(
        qkv,
        a,
        b,
        a_log,
        dt_bias,
        query_start,
        scores,
        w,
        u,
        factors,
        first,
        tokens,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        **sizes,
        **tiles,
        BLOCK_V=wide,
        CORNER=CORNER,
        num_warps=PREPARE_WARPS,
    )
    stages = CARRY_STAGES if large_shared_memory(qkv.device) else SMALL_STAGES
    # Slices of the state that fill the machine; wider ones read keys and queries less often.
    narrow = min(wide, 32 if seqs * heads * cdiv(dv, 64) < multiprocessors(qkv.device) else 64)
    workspace.launch(_carry, (cdiv(dv, narrow), heads, seqs))(
        qkv,
        scores,
        w,
        u,
        factors,
        state,
        state_slots,
        query_start,
        context_len,
        out,
        first,
        tokens,
        qkv.stride(0),
        state.stride(0),
        **sizes,
        **tiles,
        BLOCK_V=narrow,
        STAGES=EXACT_STAGES if exact else stages,
        num_warps=CARRY_WARPS,
    )
