"""Paged attention: sequences of one query by one kernel, longer ones by another, which `dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.hardware import multiprocessors, shared_bytes
from kernels.paged_attention import decode_persistent as stream
from kernels.paged_attention import decode_persistent_fp8 as stream_fp8
from kernels.paged_attention.dispatch import LONGER, SINGLES, LongerProblem, SingleProblem, many_queries, streamed
from kernels.paged_attention.prompt import ROWS, suits
from kernels.paged_attention.tiles import Operands
from kernels.paged_attention.upcast import upcasts
from kernels.workspace import Workspace


def paged_attention(
    workspace: Workspace,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    scales: CacheScales = UNSCALED,
) -> torch.Tensor:
    """Sequence i's queries are the last query_start[i+1] − query_start[i] of its context_len[i] tokens.

    A query at position p sees keys at positions j with j ≤ p and, with a window w, j > p − w:
        s = softcap(scale · q·k),   o = Σ softmax(s)·v,   a sink adds exp(sink) to the softmax's denominator.
    softcap(s) = c·tanh(s / c). Softmax in base 2: weights are 2^(s·log₂e − m) with a running maximum m.

    Shapes as in the reference; scale is positive, sequences cover all tokens, the caches' blocks, heads and slots may
    be strided. Grid and workspace depend on shapes and on the host bounds alone, and lengths are read on the device, so
    a captured launch serves any lengths within the bounds.
    On Hopper, prompts take a kernel of their own (`prompt`), behind one that writes an 8-bit cache out for them where
    the host knows how much they read (`upcast`). In a graph they run beside the single sequences: those read
    memory, these multiply. Many single sequences that are alone in their step take one of their own as well
    (`decode_persistent`). Calls on a device share their arrival counters: they must run in one stream order.
    """
    t, h, _ = q.shape
    out = torch.empty((t, h, v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    given = (batch, scale, window, softcap, sinks, deterministic)
    attend_into(workspace, out, q, k_cache, v_cache, block_table, *given, scales=scales)
    return out


def attend_into(
    workspace: Workspace,
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    singles: bool = True,
    scales: CacheScales = UNSCALED,
) -> None:
    """`paged_attention` into `out`, of which the tokens of single sequences are left alone unless `singles`."""
    (tokens, _, d), seqs, num_single = q.shape, batch.context_len.shape[0], batch.num_single
    q = q if q.stride(1) == d and q.stride(2) == 1 else q.contiguous()
    operands = Operands(workspace, out, q, k_cache, v_cache, block_table, batch, scale, window, softcap, sinks, scales)
    if deterministic:
        chosen = LONGER.choose(_longer(operands, seqs, tokens, True))
        chosen.launch(operands, chosen.config)
        return
    with workspace.branch(singles and 0 < num_single < seqs) as wait_for_branch:
        if num_single < seqs:
            chosen = LONGER.choose(_longer(operands, seqs - num_single, tokens - num_single, False))
            chosen.launch(operands, chosen.config)
    if num_single and singles:
        chosen = SINGLES.choose(_single(operands, num_single == seqs))
        chosen.launch(operands, chosen.config)
    wait_for_branch()


def _single(operands: Operands, alone: bool) -> SingleProblem:
    workspace, _, q, k_cache, v_cache, _, batch, _, window, softcap, sinks, _ = operands
    (_, heads, d), (_, kv_heads, _, dv), table = q.shape, v_cache.shape, workspace.table
    seqs, most, group, wide = batch.num_single, batch.max_context, heads // kv_heads, max(d, dv)
    plain = window is None and softcap is None and sinks is None
    asked = plain and streamed(group, kv_heads, seqs, alone, table)
    streams, streams_fp8 = asked and stream.suits(q, k_cache, v_cache), asked and stream_fp8.suits(q, k_cache, v_cache)
    numbers = (alone, plain, streams, streams_fp8, multiprocessors(q.device), table, shared_bytes(q.device))
    return SingleProblem(q.dtype, group, kv_heads, wide, seqs, most, *numbers)


def _longer(operands: Operands, seqs: int, tokens: int, deterministic: bool) -> LongerProblem:
    workspace, _, q, k_cache, v_cache, _, batch, _, window, *_ = operands
    (_, heads, d), (_, kv_heads, _, dv), table = q.shape, v_cache.shape, workspace.table
    queries, most, group, wide = batch.max_query, batch.max_context, heads // kv_heads, max(d, dv)
    asked = not deterministic and window is None and many_queries(tokens, queries, most, table)
    prompts = asked and suits(q, k_cache, v_cache)
    ups = asked and group <= ROWS.value and upcasts(q, k_cache, v_cache, batch.max_total_context)
    about = (window is not None, prompts, ups, deterministic)
    numbers = (multiprocessors(q.device), table, shared_bytes(q.device))
    return LongerProblem(q.dtype, group, kv_heads, wide, seqs, tokens, queries, most, *about, *numbers)
