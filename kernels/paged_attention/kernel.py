"""Launches paged attention: a Triton kernel with split keys for sequences of one query and for chunks of prompts; on
Hopper longer chunks take one of their own (`prompt`), and so do some numbers of sequences of one query
(`decode_persistent`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.hardware import multiprocessors
from kernels.paged_attention import decode_persistent as stream
from kernels.paged_attention import decode_persistent_fp8 as stream_fp8
from kernels.paged_attention.attend import attend
from kernels.paged_attention.prompt import attend_prompts, suits
from kernels.paged_attention.upcast import UpcastCache, upcast, upcasts
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

MAX_SPLITS = 64
_ARRIVALS = 1 << 14
MIN_SEQS = 128

# Programs that a grid of decode sequences may hold for each that would do: sequences of very different length still
# spread.
SPARE = 8

# Multiprocessors of an H200: so many kv heads of decode sequences are a wave with one program each.
_WAVE = 132

# Queries from which on prompts take their own kernel: fewer do where nobody has many keys, else splitting the keys pays
# (measured on an H200).
_PROMPT_TOKENS, _SHORT_TOKENS, _SHORT_CONTEXT = 256, 64, 4096
# Queries of the longest sequence from which on it may, too.
_PROMPT_QUERIES = 2

# Query heads that share a kv head, and kv heads, of sequences that stream, and how many sequences (measured on an
# H200).
_STREAMED_HEADS = ((4, 8), (8, 4))
_STREAMED_SEQS = range(16, 129)


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut: rows (queries × heads of a group) and keys a tile, warps, pipeline depth.

    programs: on each multiprocessor, that keys are split for when there are few tiles. least: keys worth a split.
    rounded: whether equal decode sequences get a whole number of those programs each (`dealt_to`). dealt: whether a
    program finds its split of the decode sequences by number (`dealt_split`), so that few of the grid have none. near:
    splits that are added up at once, at most, by threads that each keep to their own channels; 0 adds up tiles of them.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 2
    least: int = 64
    rounded: bool = False
    dealt: bool = False
    near: int = 8

    def merged(self, values: int) -> int:
        """Splits of `values` numbers each that are added up at once; near ones in at most 64 registers of a thread."""
        if not self.near:
            return max(1, 4096 // values)
        return min(self.near, max(1, 64 * 32 * self.warps // values))


# Every sequence through one tile, keys from the first on: a query's result does not depend on what stands beside it.
INVARIANT = Tile(64, 32, warps=4, stages=2)


def attention_tile(
    dtype: torch.dtype, group: int, channels: int, queries: int, single: bool, seqs: int, kv_heads: int
) -> Tile:
    """The tile for `seqs` sequences of up to `queries` queries, `channels` wide: of key and value the wider, padded to
    a power of two."""
    least = next_power_of_2(group)
    rows = next_power_of_2(min(max(queries * group, 16), max(least, 128)))
    wide, deep = dtype == torch.float32, channels > 128
    if wide or deep:
        rows = max(min(rows, 64), least)
    if single and rows == 16 and not wide and not deep:
        return _decode_tile(group, seqs, seqs * kv_heads)
    keys = 32 if wide or (deep and rows > 16) else 64
    return Tile(rows, keys, warps=8 if rows >= 128 else 4, stages=2 if wide or deep else 3, near=0)


def _decode_tile(group: int, seqs: int, heads: int) -> Tile:
    """The tile for sequences of one query with `heads` kv heads in all, each shared by `group` query heads.

    Measured on an H200 between the products of a layer (docs/experiments): what decides is how full the waves
    of programs are. Where equal sequences gained what others lost, and far from what was measured, tiles are those
    of before.
    """
    if seqs > 128:
        return Tile(16, 64, warps=4, stages=3)
    if 2 * heads <= _WAVE:
        return Tile(16, 64, warps=2, stages=2, programs=4, rounded=True)
    if heads <= _WAVE:
        return Tile(16, 64, warps=4, stages=3, programs=3, rounded=True)
    # The sum of partials takes 156 registers where 4 heads share keys, 126 where 8 do: 3 programs of 4 warps fit, or 4.
    # The near sum takes 154 there, so it is left out where a fourth counts; where 4 heads share keys it takes 124.
    large = group >= 8
    if heads <= 2 * _WAVE:
        if large and 2 * heads > 3 * _WAVE:
            return Tile(16, 64, warps=4, stages=3, programs=2, rounded=True)
        return Tile(16, 32, warps=2, stages=2, programs=4)
    if heads <= 3 * _WAVE:
        return Tile(16, 64, warps=4, stages=3, programs=3, rounded=True)
    if heads <= 4 * _WAVE and large:
        return Tile(16, 64, warps=4, stages=2, programs=4, rounded=True, near=0)
    if 7 * _WAVE < 2 * heads <= 8 * _WAVE:
        return Tile(16, 64, warps=4, stages=2, programs=4, rounded=True, dealt=True)
    return Tile(16, 32, warps=4, stages=4)


def streamed(group: int, kv_heads: int, seqs: int, alone: bool) -> bool:
    """Whether `seqs` sequences of one query, `alone` in their step, take the kernel that streams their keys.

    It leaves a multiprocessor no shared memory, so prompts could not run beside it.
    """
    return alone and (group, kv_heads) in _STREAMED_HEADS and seqs in _STREAMED_SEQS


def dealt_to(programs: int, tiles: int) -> int:
    """Of `programs` that run at once, how many the keys of `tiles` kv heads of decode sequences are dealt out to,
    rounded.

    Sequences of equal length have a whole number of splits each, or those left over would take a second wave; a quarter
    of a split is left for longer sequences, so that they are not cut for a few keys. A sequence much longer is cut
    further.
    """
    return programs if tiles > programs else programs // tiles * tiles - tiles // 4


def arrivals(workspace: Workspace, single: bool = True) -> torch.Tensor:
    """Counters that every merge leaves at zero; sequences of one query and others may run at once."""
    return workspace.counters("splits of single sequences" if single else "splits of longer sequences", _ARRIVALS)


def power_below(n: int) -> int:
    """The largest power of two that is not above n, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


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
    attend_into(
        workspace,
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        batch,
        scale,
        window,
        softcap,
        sinks,
        deterministic,
        scales=scales,
    )
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
    num_single = batch.num_single
    t, h, d = q.shape
    _, g, block_size, dv = v_cache.shape
    seqs = batch.context_len.shape[0]
    q = q if q.stride(1) == d and q.stride(2) == 1 else q.contiguous()
    group = h // g
    block_d, block_dv = max(16, next_power_of_2(d)), max(16, next_power_of_2(dv))
    pdl = workspace.pdl

    def launch(first_seq: int, num_seqs: int, tokens: int, queries: int, single: bool) -> None:
        tile = (
            INVARIANT
            if deterministic
            else attention_tile(q.dtype, group, max(block_d, block_dv), queries, single, num_seqs, g)
        )
        programs = tile.programs * multiprocessors(q.device)
        block_q = 1 if single else tile.rows // group
        tiles = num_seqs if single else tokens // block_q + num_seqs
        spare = SPARE * programs if single else programs
        splits = min(power_below(spare // (tiles * g)), next_power_of_2(cdiv(batch.max_context, tile.keys)))
        splits = 1 if deterministic else max(1, min(splits, MAX_SPLITS))
        rows = next_power_of_2(group) if single else tile.rows
        work = (tiles * g, splits, rows) if splits > 1 else (1, 1, 1)
        partial = torch.empty((*work, dv), dtype=torch.float32, device=q.device)
        lse = torch.empty(work, dtype=torch.float32, device=q.device)
        programs = dealt_to(programs, tiles * g) if tile.rounded else programs
        dealt = tile.dealt and single and splits > 1
        # Sequences have as many splits as `programs` have work, and at most one more each.
        grid = (g, tiles + cdiv(programs, g)) if dealt else (tiles, g, splits)
        workspace.launch(attend, grid)(
            q,
            k_cache,
            v_cache,
            block_table,
            batch.query_start,
            batch.context_len,
            sinks if sinks is not None else q,
            out,
            partial,
            lse,
            arrivals(workspace, single),
            q.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_table.stride(0),
            scale * scales.k,
            softcap if softcap is not None else 0.0,
            window if window is not None else 0,
            scales.v,
            first_seq,
            num_seqs,
            splits,
            programs,
            tile.least,
            H=h,
            G=g,
            GROUP=group,
            D=d,
            DV=dv,
            BLOCK_SIZE=block_size,
            BLOCK_M=tile.rows,
            BLOCK_Q=block_q,
            BLOCK_N=tile.keys,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_B=max(MIN_SEQS, next_power_of_2(num_seqs)) if single and splits > 1 else 1,
            ROWS=rows,
            SPLITS=1 if splits == 1 else MAX_SPLITS,
            MERGE=tile.merged(rows * block_dv),
            IS_NEAR=tile.near > 0,
            IS_SINGLE=single,
            IS_DEALT=dealt,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    if deterministic:
        launch(0, seqs, t, batch.max_query, single=False)
        return
    tokens = t - num_single
    many = tokens >= (_SHORT_TOKENS if batch.max_context <= _SHORT_CONTEXT else _PROMPT_TOKENS)
    many = many and batch.max_query >= _PROMPT_QUERIES
    given = (k_cache, v_cache, block_table)
    with workspace.branch(singles and 0 < num_single < seqs) as wait_for_branch:
        held = UpcastCache(k_cache, v_cache, block_table)
        prompts = num_single < seqs and many and window is None
        if prompts and upcasts(q, k_cache, v_cache, batch.max_total_context):
            held = upcast(workspace, *given, batch.context_len, q.dtype, num_single, batch.max_total_context)
        if prompts and suits(q, held.k, held.v):
            lengths, rest = (
                (batch.query_start, batch.context_len),
                (num_single, seqs - num_single, batch.max_query),
            )
            caches = (held.k, held.v, held.table)
            attend_prompts(workspace, q, *caches, *lengths, out, scale, *rest, softcap, sinks, scales)
        elif num_single < seqs:
            launch(num_single, seqs - num_single, tokens, batch.max_query, single=False)
    plain = window is None and softcap is None and sinks is None
    streams = singles and plain and streamed(group, g, num_single, num_single == seqs)
    more = (batch.context_len, out)
    if streams and stream.suits(q, k_cache, v_cache):
        stream.attend_decode(workspace, q, *given, *more, arrivals(workspace), scale, num_single)
    elif streams and stream_fp8.suits(q, k_cache, v_cache):
        stream_fp8.attend_decode(workspace, q, *given, *more, arrivals(workspace), scale, num_single, scales)
    elif num_single and singles:
        launch(0, num_single, num_single, 1, single=True)
    wait_for_branch()
