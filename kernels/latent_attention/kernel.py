"""Attention over a latent cache: sequences of one query by one kernel, longer ones by another, as `dispatch` chooses.
In a graph longer sequences that are expanded run beside the others, which read memory."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import latent_views
from kernels.latent_attention import prompt, stream_k, up
from kernels.latent_attention.dispatch import (
    LONGER,
    SINGLES,
    LongerProblem,
    Operands,
    SingleProblem,
    fills_device,
    streamed,
)
from kernels.workspace import Workspace


def latent_attention(
    workspace: Workspace,
    q: torch.Tensor,
    absorbed: torch.Tensor,
    kv_up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    max_total_context: int = 0,
    deterministic: bool = False,
    keys: torch.Tensor | None = None,
    latent_scale: float = 1.0,
) -> torch.Tensor:
    """See the reference. Expanded sequences need heads whose partials are powers of two from 16 on."""
    num_single = batch.num_single
    t, heads, channels = q.shape
    held = latent_views(cache, keys, kv_up.shape[-1], latent_scale)
    nope = channels - held.keys.shape[-1]
    value = kv_up.shape[1] - nope
    out = torch.empty(t, heads, value, dtype=q.dtype, device=q.device)
    operands = Operands(workspace, out, q, absorbed, kv_up, cache, held, block_table, batch, scale, max_total_context)
    if deterministic:
        chosen = LONGER.choose(LongerProblem(q.dtype, False, False, False, True))
        chosen.launch(operands, chosen.config)
        return out
    whole = fills_device(num_single, t - num_single, heads, workspace.table)
    if batch.context_len.shape[0] == num_single:
        if num_single:
            _attend_single(operands, whole)
        return out
    expanded = absorbed.shape[0] < t
    with workspace.branch(expanded and num_single > 0 and not whole) as wait_for_branch:
        ups = expanded and whole and up.suits(kv_up, cache)
        prompts = expanded and whole and prompt.suits(q, nope, value)
        chosen = LONGER.choose(LongerProblem(q.dtype, expanded, ups, prompts, False))
        chosen.launch(operands, chosen.config)
    if num_single:
        _attend_single(operands, whole)
    wait_for_branch()
    return out


def _attend_single(operands: Operands, whole: bool) -> None:
    """Sequences of one query, whose kernel may take the `whole` device."""
    workspace, _, q, absorbed, kv_up, cache, _, _, batch, _, _ = operands
    seqs, table = batch.num_single, workspace.table
    streams = whole and streamed(seqs, table) and stream_k.suits(absorbed, kv_up, cache)
    chosen = SINGLES.choose(SingleProblem(q.dtype, q.shape[1], seqs, whole, streams, table))
    chosen.launch(operands, chosen.config)
