"""Gated delta rule (Yang et al. 2024, arXiv:2412.06464) of a mixed batch, with its state kept a request."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from kernels.batch import AttentionBatch

CHUNK = 64


def gated_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    num_key_heads: int,
    deterministic: bool = False,
    states_only: bool = False,
) -> torch.Tensor | None:
    """For each token of a sequence, a head's state S [Dk, Dv] becomes
        S ← eᵍ S,   S ← S + k ⊗ β (v − kᵀS),   o = qᵀS / √Dk,
    with g = −e^a_log · softplus(a + dt_bias), β = sigmoid(b), and q and k divided by their length √(Σx² + 1e-6).

    A sequence whose first token is its request's first starts from S = 0, another from state[state_slots[i]]; both
    leave S there, or that behind the tokens that are `num_kept`. Key head i serves the value heads
    i·H/Hk … (i+1)·H/Hk − 1. Many tokens are taken in chunks: within one, the updates solve a unit triangular system.

    qkv [T, 2·Hk·Dk + H·Dv] (queries, keys, values); a, b [T, H]; a_log, dt_bias [H]; state [S, H, Dk, Dv] float32,
    written in place; state_slots [B] int64; query_start [B+1], context_len [B] int32 → [T, H, Dv] in qkv's dtype.
    Computed in float32.
    deterministic: a token's result has the same bits whatever else the batch holds and however prompts are chunked.
    states_only: gives None; tokens behind those that are kept are not computed.
    """
    _, heads, dk, dv = state.shape
    t = qkv.shape[0]
    q, k, v = qkv.split((num_key_heads * dk, num_key_heads * dk, heads * dv), dim=-1)

    def unit(x: torch.Tensor) -> torch.Tensor:
        f = x.float().view(t, num_key_heads, dk)
        f = f * torch.rsqrt(f.square().sum(dim=-1, keepdim=True) + 1e-6)
        return f.repeat_interleave(heads // num_key_heads, dim=1).transpose(0, 1)

    q, k = unit(q) * dk**-0.5, unit(k)
    v = v.float().view(t, heads, dv).transpose(0, 1)
    g = (-a_log.float().exp() * F.softplus(a.float() + dt_bias.float())).T
    beta = torch.sigmoid(b.float()).T
    out = torch.empty(t, heads, dv, dtype=qkv.dtype, device=qkv.device)
    kept = None if batch.num_kept is None else batch.num_kept.tolist()
    starts, lens, slots = batch.query_start.tolist(), batch.context_len.tolist(), state_slots.tolist()
    for i, slot in enumerate(slots):
        lo, hi = starts[i], starts[i + 1]
        if hi == lo:
            continue
        s = state[slot].clone() if lens[i] > hi - lo else torch.zeros_like(state[slot])
        step = 1 if deterministic else CHUNK
        stop = hi if kept is None else lo + kept[i]
        # A chunk ends where the state is kept.
        bounds = [*range(lo, stop, step), *range(stop, hi, step), hi]
        for first, end in itertools.pairwise(bounds):
            if first == stop:
                state[slot] = s if first > lo else state[slot]
            c = slice(first, end)
            o, s = _chunk(q[:, c], k[:, c], v[:, c], g[:, c], beta[:, c], s)
            out[c] = o.transpose(0, 1).to(out.dtype)
        if stop == hi:
            state[slot] = s
    return None if states_only else out


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of C tokens of every head: q, k [H, C, Dk], v [H, C, Dv], g, beta [H, C], s [H, Dk, Dv] → o and s.

    With G the running sum of g, the write of token i is
        u_i = β_i (v_i − e^{G_i} k_iᵀS − Σ_{j<i} e^{G_i − G_j} (k_i·k_j) u_j),
    a unit lower triangular system in u.
    """
    total = g.cumsum(dim=-1)
    decay = (total[:, :, None] - total[:, None]).tril().exp().tril()
    system = (beta[..., None] * (k @ k.transpose(1, 2)) * decay).tril(-1)
    wanted = beta[..., None] * (v - total.exp()[..., None] * (k @ s))
    u = torch.linalg.solve_triangular(
        system + torch.eye(k.shape[1], device=k.device), wanted, upper=False, unitriangular=True
    )
    o = total.exp()[..., None] * (q @ s) + (q @ k.transpose(1, 2) * decay) @ u
    last = total[:, -1:]
    return o, last.exp()[..., None] * s + (k * (last - total).exp()[..., None]).transpose(1, 2) @ u
