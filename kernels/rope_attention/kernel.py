"""Rope, KV write and attention: one kernel for sequences of one token, or the two ops, as `dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.hardware import multiprocessors, shared_bytes
from kernels.rope import Rope
from kernels.rope_attention.dispatch import DISPATCH, Operands, Problem
from kernels.workspace import Workspace


def rope_attention(
    workspace: Workspace,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    fused: bool = True,
    scales: CacheScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_kv_write`, then `paged_attention` of its queries over the caches that it has written.

    Without sinks, some numbers of sequences of one token take one kernel (`single`), which reads their cached keys
    while the kernel that computes qkv still runs: those were written by earlier steps. Others, and sequences of several
    tokens, take the two ops' own kernels. Grid and workspace depend on shapes and host bounds alone. Shapes as in the
    reference; qkv's rows may be strided.
    """
    (tokens, width), (_, kv_heads, _, d), seqs = qkv.shape, k_cache.shape, batch.num_single
    group, alone = (width // d - 2 * kv_heads) // kv_heads, seqs == tokens
    gpu = (multiprocessors(qkv.device), workspace.table, shared_bytes(qkv.device))
    numbers = (alone, fused, sinks is not None, deterministic, *gpu)
    chosen = DISPATCH.choose(Problem(qkv.dtype, group, kv_heads, d, seqs, batch.max_context, *numbers))
    given = (k_cache, v_cache, block_table, batch, scale, window, softcap, deterministic, scales, sinks)
    out: torch.Tensor = chosen.launch(Operands(workspace, qkv, positions, slots, rope, *given), chosen.config)
    return out
