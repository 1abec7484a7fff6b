"""Gated DeltaNet between its projections: one kernel for lines of one token, four for the others."""

from __future__ import annotations

import torch

from kernels.causal_conv.kernel import conv_lines
from kernels.gated_delta.chunks import chunk_lines
from kernels.gated_delta.step import step_lines
from kernels.gated_norm.kernel import norm_into


def delta_net(
    x: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    state_slots: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_key_heads: int,
    num_single: int,
    max_query: int,
) -> torch.Tensor:
    """See the reference; a line of one token rounds once, at the end. The last axes and a slot of a state are dense."""
    tokens, lines = x.shape[0], context_len.shape[0]
    _, heads, _, dv = state.shape
    out = torch.empty(tokens, heads * dv, dtype=x.dtype, device=x.device)
    delta = (a, b, a_log, dt_bias, state, state_slots, query_start, context_len, num_key_heads)
    if num_single:
        conv, norm = (conv_weight, conv_state), (z, norm_weight, eps)
        step_lines(x, *delta, num_single, out, conv, norm)
    if lines > num_single:
        qkv = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        places = (state_slots, query_start, context_len)
        conv_lines(x, conv_weight, conv_state, *places, qkv, num_single, lines, max_query)
        o = torch.empty(tokens, heads, dv, dtype=x.dtype, device=x.device)
        chunk_lines(qkv, *delta, num_single, lines, max_query, o)
        # Lines of one token come first, and so do their tokens.
        norm_into(o, z, norm_weight, eps, out, first=num_single)
    return out
