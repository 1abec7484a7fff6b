"""Paged attention: sequences of one query by one kernel, longer ones by another, which `dispatch` chooses."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.hardware import multiprocessors
from kernels.paged_attention import decode_persistent as stream
from kernels.paged_attention import decode_persistent_fp8 as stream_fp8
from kernels.paged_attention.dispatch import LONGER, SINGLES, LongerProblem, SingleProblem, many_queries, streamed
from kernels.paged_attention.prompt import ROWS, suits
from kernels.paged_attention.tiles import Operands
from kernels.paged_attention.upcast import upcasts
from kernels.sizes import next_power_of_2
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
    d, seqs, num_single = q.shape[-1], len(batch.context_len), batch.num_single
    q = q if q.stride(1) == d and q.stride(2) == 1 else q.contiguous()
    given = (out, q, k_cache, v_cache, block_table, batch, scale, window, softcap, sinks, scales)
    operands = Operands(workspace, *given)
    if deterministic:
        chosen = LONGER.choose(_longer(operands, seqs, len(q), True))
        chosen.launch(operands, chosen.config)
        return
    with workspace.branch(singles and 0 < num_single < seqs) as wait_for_branch:
        if num_single < seqs:
            chosen = LONGER.choose(_longer(operands, seqs - num_single, len(q) - num_single, False))
            chosen.launch(operands, chosen.config)
    if num_single and singles:
        chosen = SINGLES.choose(_single(operands, num_single == seqs))
        chosen.launch(operands, chosen.config)
    wait_for_branch()


def _heads(q: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.dtype, int, int, int]:
    """dtype, query heads that share a kv head, kv heads, and channels as problems have them."""
    _, heads, d = q.shape
    kv_heads, dv = v_cache.shape[1], v_cache.shape[-1]
    return q.dtype, heads // kv_heads, kv_heads, max(16, next_power_of_2(d), next_power_of_2(dv))


def _single(operands: Operands, alone: bool) -> SingleProblem:
    _, _, q, k_cache, v_cache, _, batch, _, window, softcap, sinks, _ = operands
    seqs, (dtype, group, kv_heads, channels) = batch.num_single, _heads(q, v_cache)
    plain = window is None and softcap is None and sinks is None
    asked = plain and streamed(group, kv_heads, seqs, alone)
    return SingleProblem(
        *(dtype, group, kv_heads, channels, seqs, batch.max_context, alone, plain),
        asked and stream.suits(q, k_cache, v_cache),
        asked and stream_fp8.suits(q, k_cache, v_cache),
        multiprocessors(q.device),
    )


def _longer(operands: Operands, seqs: int, tokens: int, deterministic: bool) -> LongerProblem:
    _, _, q, k_cache, v_cache, _, batch, _, window, *_ = operands
    dtype, group, kv_heads, channels = _heads(q, v_cache)
    asked = not deterministic and window is None and many_queries(tokens, batch.max_query, batch.max_context)
    return LongerProblem(
        *(dtype, group, kv_heads, channels, seqs, tokens, batch.max_query, batch.max_context, window is not None),
        asked and suits(q, k_cache, v_cache),
        asked and group <= ROWS.value and upcasts(q, k_cache, v_cache, batch.max_total_context),
        deterministic,
        multiprocessors(q.device),
    )
