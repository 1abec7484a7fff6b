"""Gated delta rule: sequences of one token by a kernel of their own, the others in chunks on the tensor cores. Where
states keep a part of the tokens alone, which are drafts and few, all sequences go token by token."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.gated_delta.chunks import chunk_seqs
from kernels.gated_delta.recurrent import recurrent_seqs
from kernels.gated_delta.step import step_seqs
from kernels.workspace import Workspace


def gated_delta(
    workspace: Workspace,
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
    """See the reference. The last axes of qkv, a and b, and a slot of the state, are dense."""
    num_single = batch.num_single
    _, heads, _, dv = state.shape
    seqs = batch.context_len.shape[0]
    values = (qkv, a, b, a_log, dt_bias, state, state_slots, batch.query_start, batch.context_len, num_key_heads)
    if states_only:
        recurrent_seqs(workspace, *values, None, batch.num_kept)
        return None
    out = torch.empty(qkv.shape[0], heads, dv, dtype=qkv.dtype, device=qkv.device)
    if deterministic or batch.num_kept is not None:
        recurrent_seqs(workspace, *values, out, batch.num_kept)
        return out
    if num_single:
        step_seqs(workspace, *values, num_single, out)
    if seqs > num_single:
        chunk_seqs(workspace, *values, num_single, seqs, batch.max_query, out)
    return out
