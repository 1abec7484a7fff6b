"""Gated DeltaNet between its projections: two kernels for sequences of one token, four for the others."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.causal_conv.kernel import conv_seqs
from kernels.gated_delta.chunks import chunk_seqs
from kernels.gated_delta.recurrent import recurrent_seqs
from kernels.gated_delta.step import step_seqs
from kernels.gated_norm.kernel import gated_norm
from kernels.workspace import Workspace


def delta_net(
    workspace: Workspace,
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
    batch: AttentionBatch,
    num_key_heads: int,
    deterministic: bool = False,
) -> torch.Tensor:
    """See the reference; a sequence of one token does not round behind the convolution.

    The last axes and a slot of a state are dense.
    """
    num_single = batch.num_single
    tokens, seqs = x.shape[0], batch.context_len.shape[0]
    _, heads, _, dv = state.shape
    o = torch.empty(tokens, heads, dv, dtype=x.dtype, device=x.device)
    delta = (a, b, a_log, dt_bias, state, state_slots, batch.query_start, batch.context_len, num_key_heads)
    if deterministic or batch.num_kept is not None:
        qkv = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        places = (state_slots, batch.query_start, batch.context_len)
        conv_seqs(workspace, x, conv_weight, conv_state, *places, qkv, 0, seqs, batch.max_query, True)
        recurrent_seqs(workspace, qkv, *delta, o, batch.num_kept)
        return gated_norm(workspace, o, z, norm_weight, eps)
    if num_single:
        step_seqs(workspace, x, *delta, num_single, o, (conv_weight, conv_state))
    if seqs > num_single:
        qkv = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        places = (state_slots, batch.query_start, batch.context_len)
        conv_seqs(workspace, x, conv_weight, conv_state, *places, qkv, num_single, seqs, batch.max_query)
        chunk_seqs(workspace, qkv, *delta, num_single, seqs, batch.max_query, o)
    return gated_norm(workspace, o, z, norm_weight, eps)
