"""Whether rope, KV write and attention are one kernel or the two ops that they consist of, decided once a shape.
Thresholds and tiles were measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import CacheScales
from kernels.dispatch import Dispatch, Variant
from kernels.hardware import MAX_SHARED
from kernels.paged_attention.kernel import attend_into, paged_attention
from kernels.paged_attention.tiles import MAX_SPLITS, MIN_SEQS, Tile, arrivals, fitting_tile, power_below
from kernels.rope import Rope
from kernels.rope_attention.single import attend_single
from kernels.rope_kv_write.kernel import rope_into, rope_kv_write
from kernels.sizes import cdiv, next_power_of_2
from kernels.thresholds import SHORT_CONTEXT
from kernels.tuned.tables import DEFAULT, numbers
from kernels.workspace import Workspace


class Problem(NamedTuple):
    """What the choice of kernels depends on.

    group: query heads that share one of kv_heads. channels of a head. seqs of one token,
    alone in their step or beside others. fused: one kernel is allowed for both ops. table: of tuned numbers. shared:
    bytes of shared memory that a block may have.
    """

    dtype: torch.dtype
    group: int
    kv_heads: int
    channels: int
    seqs: int
    max_context: int
    alone: bool
    fused: bool
    sinks: bool
    deterministic: bool
    multiprocessors: int
    table: str = DEFAULT
    shared: int = MAX_SHARED


class Operands(NamedTuple):
    """As in the reference."""

    workspace: Workspace
    qkv: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rope: Rope
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    batch: AttentionBatch
    scale: float
    window: int | None
    softcap: float | None
    deterministic: bool
    scales: CacheScales
    sinks: torch.Tensor | None

    @property
    def num_heads(self) -> int:
        return self.qkv.shape[1] // self.k_cache.shape[-1] - 2 * self.k_cache.shape[1]


@dataclass(frozen=True, slots=True)
class FusedDecodeTile(Tile):
    """A tile of sequences of one token: a row below the group's queries is the new key.

    ahead: tiles of keys that are loaded before the wait.
    """

    near: int = 16
    ahead: int = 1


class FusedCut(NamedTuple):
    """A launch over sequences of one token: splits that one's keys may have, programs that they are split for."""

    tile: FusedDecodeTile
    splits: int
    programs: int


def fuses(seqs: int, alone: bool, heads: int, wide: bool, table: str = DEFAULT) -> bool:
    """Whether one kernel is faster than two for `seqs` sequences of one token with `heads` kv heads in all.

    It is for one sequence, whatever stands beside it, and for sequences `alone` in their step with few heads and a
    `wide` tile.
    """
    return seqs == 1 or (alone and wide and heads <= numbers(table, "rope_attention")["few_heads"])


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


def _fitting(problem: Problem, tile: FusedDecodeTile) -> FusedDecodeTile:
    """What of the tile fits the GPU. A split that is worth it keeps no more keys than are loaded before the wait."""
    channels = max(16, next_power_of_2(problem.channels))
    made = fitting_tile(tile, problem.dtype, channels, problem.shared, tile.rows)
    return replace(made, least=made.keys) if tile.least == tile.keys else made


def fused_cut(problem: Problem, tile: FusedDecodeTile) -> FusedCut:
    """With that tile."""
    assert tile.rows > problem.group, "the new key is a row below the queries"
    tile = _fitting(problem, tile)
    programs = tile.programs * problem.multiprocessors
    # A program holds most of a multiprocessor's shared memory, and those without work would keep the next kernel out:
    # one wave is all there is.
    wanted = power_below(programs // (problem.seqs * problem.kv_heads))
    splits = min(wanted, next_power_of_2(cdiv(problem.max_context, tile.keys)))
    return FusedCut(tile, max(1, min(splits, MAX_SPLITS)), programs)


def cannot_fuse(problem: Problem) -> str | None:
    """Why one kernel does not take these, however fast."""
    if problem.deterministic:
        return "its sums depend on the number of sequences"
    if not problem.fused:
        return "runtime.fused_attention is off"
    if problem.sinks:
        return "has no sinks"
    return None if problem.seqs else "for sequences of one token"


def _not_fused(problem: Problem) -> str | None:
    why = cannot_fuse(problem)
    wide = _wide(problem.dtype, problem.group, next_power_of_2(problem.channels))
    if why is None and not fuses(problem.seqs, problem.alone, problem.seqs * problem.kv_heads, wide, problem.table):
        few = numbers(problem.table, "rope_attention")["few_heads"]
        why = f"for one sequence, or up to {few} kv heads in 16 bits that are alone in their step"
    return why


def _fused_cut(problem: Problem) -> FusedCut:
    dtype, group, _, channels, seqs, max_context, *_ = problem
    width = max(16, next_power_of_2(channels))
    return fused_cut(problem, fused_decode_tile(dtype, group, width, seqs, max_context))


def _two_ops(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, qkv, positions, slots, rope, k_cache, v_cache, table, batch, scale, window, softcap, *_rest = operands
    deterministic, scales = operands.deterministic, operands.scales
    written = (qkv, positions, slots, rope, k_cache, v_cache, operands.num_heads, deterministic, scales)
    q = rope_kv_write(workspace, *written)
    given = (table, batch, scale, window, softcap, operands.sinks, deterministic, scales)
    return paged_attention(workspace, q, k_cache, v_cache, *given)


def _fused(operands: Operands, cut: FusedCut) -> torch.Tensor:
    """Sequences of one token by one kernel, others beside them by the two ops."""
    workspace, qkv, positions, slots, rope, k_cache, v_cache, table, batch, scale, window, softcap, *_rest = operands
    tokens, scales, heads = len(qkv), operands.scales, operands.num_heads
    out = torch.empty((tokens, heads, k_cache.shape[-1]), dtype=qkv.dtype, device=qkv.device)
    longer = tokens > batch.num_single
    with workspace.branch(longer) as wait_for_branch:
        if longer:
            q = torch.empty_like(out)
            rest = slice(batch.num_single, None)
            written = (qkv[rest], positions[rest], slots[rest], rope, k_cache, v_cache, heads)
            rope_into(workspace, q[rest], *written, scales=scales)
            own = (out, q, k_cache, v_cache, table, batch, scale, window, softcap)
            attend_into(workspace, *own, singles=False, scales=scales)
    _singles(operands, out, cut)
    wait_for_branch()
    return out


def _singles(operands: Operands, out: torch.Tensor, cut: FusedCut) -> None:
    """The batch's sequences of one token, which are the first tokens, into `out`."""
    workspace, qkv, positions, slots, rope, k_cache, v_cache, table, batch, scale, window, softcap, *_ = operands
    scales, (tile, splits, programs), seqs = operands.scales, cut, batch.num_single
    _, h, d = out.shape
    _, g, block_size, _ = k_cache.shape
    group = h // g
    block_d = max(16, next_power_of_2(d))
    rows = next_power_of_2(group)
    work = (seqs * g, splits, rows) if splits > 1 else (1, 1, 1)
    partial = torch.empty((*work, d), dtype=torch.float32, device=qkv.device)
    lse = torch.empty(work, dtype=torch.float32, device=qkv.device)
    pdl = workspace.pdl
    workspace.launch(attend_single, (seqs, g, splits))(
        qkv, positions, slots, rope.cos_sin, rope.q_norm if rope.q_norm is not None else qkv,
        rope.k_norm if rope.k_norm is not None else qkv, k_cache, v_cache, table, batch.context_len, out, partial, lse,
        arrivals(workspace), qkv.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], table.stride(0), rope.eps,
        rope.offset, scale * scales.k, softcap if softcap is not None else 0.0, window if window is not None else 0,
        1.0 / scales.k, 1.0 / scales.v, scales.v, seqs, splits, programs, tile.least,
        H=h, G=g, GROUP=group, D=d, R=rope.cos_sin.shape[1], BLOCK_SIZE=block_size, BLOCK_M=tile.rows,
        BLOCK_N=tile.keys, BLOCK_D=block_d,
        # The keys of one sequence are all there are to deal out.
        BLOCK_B=max(MIN_SEQS, next_power_of_2(seqs)) if splits > 1 and seqs > 1 else 1,
        ROWS=rows, SPLITS=1 if splits == 1 else MAX_SPLITS, MERGE=tile.merged(rows * block_d), AHEAD=tile.ahead,
        HAS_Q_NORM=rope.q_norm is not None, HAS_K_NORM=rope.k_norm is not None, HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None, IS_INTERLEAVED=rope.interleaved,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32", PDL=pdl, launch_pdl=pdl,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "fused",
            _not_fused,
            _fused_cut,
            _fused,
            "docs/experiments/2026-11-20-decode-attention.md (attention-one-line.jsonl, attention-lines.jsonl)",
        ),
        Variant(
            "two_ops",
            lambda problem: None,
            lambda problem: None,
            _two_ops,
            "rope_kv_write, then paged_attention; docs/experiments/2026-11-20-decode-attention.md",
        ),
    ]
)
