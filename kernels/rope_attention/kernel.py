"""Launches rope, KV write and attention: as one kernel for sequences of one token, else as the two ops it consists
of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.hardware import multiprocessors
from kernels.paged_attention.kernel import (
    MAX_SPLITS,
    MIN_SEQS,
    Tile,
    arrivals,
    attend_into,
    paged_attention,
    power_below,
)
from kernels.rope import Rope
from kernels.rope_attention.single import attend_single
from kernels.rope_kv_write.kernel import rope_into, rope_kv_write
from kernels.sizes import cdiv, next_power_of_2
from kernels.thresholds import SHORT_CONTEXT
from kernels.workspace import Workspace

# kv heads of sequences that are few (measured on an H200, see docs/experiments).
FEW_HEADS = 32


@dataclass(frozen=True, slots=True)
class FusedDecodeTile(Tile):
    """A tile of sequences of one token: a row below the group's queries is the new key.

    ahead: tiles of keys that are loaded before the wait.
    """

    near: int = 16
    ahead: int = 1


def fuses(seqs: int, alone: bool, heads: int, wide: bool) -> bool:
    """Whether one kernel is faster than two for `seqs` sequences of one token with `heads` kv heads in all.

    It is for one sequence, whatever stands beside it, and for sequences `alone` in their step with few heads and a
    `wide` tile.
    """
    return seqs == 1 or (alone and wide and heads <= FEW_HEADS)


def fused_decode_tile(dtype: torch.dtype, group: int, channels: int, seqs: int, max_context: int) -> FusedDecodeTile:
    """The tile for `seqs` sequences of up to `max_context` tokens, `channels` wide, a power of two; `group` query heads
    share a kv head.

    A split that is worth it has no more keys than are loaded before the wait. One sequence whose context is short takes
    small tiles: they are done sooner, and leave the next kernel room to ask for its weights. Wide tiles and those of
    256 channels were measured on an H200; for one sequence of 16 heads that share keys, four warps spill.
    """
    rows = max(8, next_power_of_2(group + 1))
    if not _wide(dtype, group, channels):
        return FusedDecodeTile(max(16, rows), 32, warps=8 if rows * channels > 8192 else 4, stages=2)
    if seqs == 1 and rows <= 16 and max_context <= SHORT_CONTEXT:
        keys, stages = (32, 3) if rows == 16 else (64, 2)
        return FusedDecodeTile(rows, keys, warps=4, stages=stages, programs=1, least=keys)
    if seqs == 1 and rows <= 16:
        return FusedDecodeTile(rows, 128, warps=4, stages=3, programs=1, least=128)
    return FusedDecodeTile(rows, 256, warps=8, stages=2, programs=1, least=256)


def _wide(dtype: torch.dtype, group: int, channels: int) -> bool:
    """Whether a tile of 128 keys fits."""
    return group <= 16 and channels <= 128 and dtype != torch.float32


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
    num_single = batch.num_single
    tokens, d = qkv.shape[0], k_cache.shape[-1]
    groups = k_cache.shape[1]
    num_heads = qkv.shape[1] // d - 2 * groups
    wide = _wide(qkv.dtype, num_heads // groups, next_power_of_2(d))
    heads = num_single * groups
    one = num_single > 0 and fuses(num_single, num_single == tokens, heads, wide)
    if deterministic or not fused or not one or sinks is not None:
        q = rope_kv_write(workspace, qkv, positions, slots, rope, k_cache, v_cache, num_heads, deterministic, scales)
        given = (block_table, batch, scale, window, softcap, sinks, deterministic, scales)
        return paged_attention(workspace, q, k_cache, v_cache, *given)
    out = torch.empty((tokens, num_heads, d), dtype=qkv.dtype, device=qkv.device)
    with workspace.branch(tokens > num_single) as wait_for_branch:
        if tokens > num_single:
            q = torch.empty_like(out)
            rest = slice(num_single, None)
            written = (qkv[rest], positions[rest], slots[rest], rope, k_cache, v_cache, num_heads)
            rope_into(workspace, q[rest], *written, scales=scales)
            own = (out, q, k_cache, v_cache, block_table, batch, scale, window, softcap)
            attend_into(workspace, *own, singles=False, scales=scales)
    single = (qkv, positions, slots, rope, k_cache, v_cache, block_table, batch, scale, window, softcap, scales)
    _singles(workspace, out, *single)
    wait_for_branch()
    return out


def _singles(
    workspace: Workspace,
    out: torch.Tensor,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    scales: CacheScales,
) -> None:
    """The batch's sequences of one token, which are the first tokens, into `out`."""
    seqs, max_context = batch.num_single, batch.max_context
    _, h, d = out.shape
    _, g, block_size, _ = k_cache.shape
    group = h // g
    block_d = max(16, next_power_of_2(d))
    tile = fused_decode_tile(qkv.dtype, group, block_d, seqs, max_context)
    assert tile.rows > group, "the new key is a row below the queries"
    programs = tile.programs * multiprocessors(qkv.device)
    # A program holds most of a multiprocessor's shared memory, and those without work would keep the next kernel out:
    # one wave is all there is.
    splits = min(power_below(programs // (seqs * g)), next_power_of_2(cdiv(max_context, tile.keys)))
    splits = max(1, min(splits, MAX_SPLITS))
    rows = next_power_of_2(group)
    work = (seqs * g, splits, rows) if splits > 1 else (1, 1, 1)
    partial = torch.empty((*work, d), dtype=torch.float32, device=qkv.device)
    lse = torch.empty(work, dtype=torch.float32, device=qkv.device)
    pdl = workspace.pdl
    workspace.launch(attend_single, (seqs, g, splits))(
        qkv,
        positions,
        slots,
        rope.cos_sin,
        rope.q_norm if rope.q_norm is not None else qkv,
        rope.k_norm if rope.k_norm is not None else qkv,
        k_cache,
        v_cache,
        block_table,
        batch.context_len,
        out,
        partial,
        lse,
        arrivals(workspace),
        qkv.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        rope.eps,
        rope.offset,
        scale * scales.k,
        softcap if softcap is not None else 0.0,
        window if window is not None else 0,
        1.0 / scales.k,
        1.0 / scales.v,
        scales.v,
        seqs,
        splits,
        programs,
        tile.least,
        H=h,
        G=g,
        GROUP=group,
        D=d,
        R=rope.cos_sin.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        # The keys of one sequence are all there are to deal out.
        BLOCK_B=max(MIN_SEQS, next_power_of_2(seqs)) if splits > 1 and seqs > 1 else 1,
        ROWS=rows,
        SPLITS=1 if splits == 1 else MAX_SPLITS,
        MERGE=tile.merged(rows * block_d),
        AHEAD=tile.ahead,
        HAS_Q_NORM=rope.q_norm is not None,
        HAS_K_NORM=rope.k_norm is not None,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        IS_INTERLEAVED=rope.interleaved,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
