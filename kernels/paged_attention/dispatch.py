"""Which kernel attends, decided once a shape: for sequences of one query, and for longer ones. Thresholds and tiles
were measured on an H200.

A Triton kernel with split keys takes both kinds; on Hopper longer chunks take one of their own (`prompt`), and so do
some numbers of sequences of one query (`decode_persistent`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.hardware import MAX_SHARED
from kernels.paged_attention import decode_persistent as stream
from kernels.paged_attention import decode_persistent_fp8 as stream_fp8
from kernels.paged_attention.prompt import attend_prompts
from kernels.paged_attention.tiles import Cut, Operands, Tile, arrivals, attend_tiles, cut, fitting_tile
from kernels.paged_attention.upcast import upcast
from kernels.sizes import next_power_of_2
from kernels.tuned.tables import DEFAULT, numbers, tiles

OP = "paged_attention"

# Every sequence through one tile, keys from the first on: a query's result does not depend on what stands beside it. A
# warp has 16 rows of the tile to itself, so a tile of one warp gives them the same bits.
INVARIANT, INVARIANT_WARP = Tile(64, 32, warps=4, stages=2), Tile(16, 32, warps=1, stages=3)

# Rows of a tile that has all queries of a sequence, at most.
WHOLE_ROWS = 32


class SingleProblem(NamedTuple):
    """What the choice of a kernel for `seqs` sequences of one query depends on.

    group: query heads that share one of kv_heads. channels: of key and value the wider.
    alone in their step; plain: no window, soft cap or sinks. streams, streams_fp8: caches of the queries' dtype, or of
    8-bit floats, are such as the kernels of those names read, on a GPU of their kind. table: of tuned numbers. shared:
    bytes of shared memory that a block may have.
    """

    dtype: torch.dtype
    group: int
    kv_heads: int
    channels: int
    seqs: int
    max_context: int
    alone: bool
    plain: bool
    streams: bool
    streams_fp8: bool
    multiprocessors: int
    table: str = DEFAULT
    shared: int = MAX_SHARED


class LongerProblem(NamedTuple):
    """What the choice of a kernel for `seqs` sequences depends on, of `tokens` queries in all and up to `queries` each;
    otherwise as in `SingleProblem`.

    windowed: keys far behind are not read. prompts: the kernel of prompts reads the caches as they are, upcasts: it
    does when they are written out in the queries' dtype, on a GPU of its kind.
    """

    dtype: torch.dtype
    group: int
    kv_heads: int
    channels: int
    seqs: int
    tokens: int
    queries: int
    max_context: int
    windowed: bool
    prompts: bool
    upcasts: bool
    deterministic: bool
    multiprocessors: int
    table: str = DEFAULT
    shared: int = MAX_SHARED


def attention_tile(
    dtype: torch.dtype,
    group: int,
    channels: int,
    queries: int,
    single: bool,
    seqs: int,
    kv_heads: int,
    table: str = DEFAULT,
) -> Tile:
    """The tile for `seqs` sequences of up to `queries` queries, `channels` wide: of key and value the wider, padded to
    a power of two."""
    least = next_power_of_2(group)
    rows = next_power_of_2(min(max(queries * group, 16), max(least, 128)))
    wide, deep = dtype == torch.float32, channels > 128
    if wide or deep:
        rows = max(min(rows, 64), least)
    if single and rows == 16 and not wide and not deep:
        return _decode_tile(group, seqs, seqs * kv_heads, table)
    keys = 32 if wide or (deep and rows > 16) else 64
    return Tile(rows, keys, warps=8 if rows >= 128 else 4, stages=2 if wide or deep else 3, near=0)


def _decode_tile(group: int, seqs: int, heads: int, table: str) -> Tile:
    """The tile for sequences of one query with `heads` kv heads in all, each shared by `group` query heads.

    Measured on an H200 between the products of a layer (docs/experiments): what decides is how full the waves
    of programs are. Where equal sequences gained what others lost, and far from what was measured, tiles are those
    of before.
    """
    made, wave = tiles(table, OP, "decode_tiles", Tile), numbers(table, OP)["wave"]
    if seqs > 128:
        return made["many_seqs"]
    if 2 * heads <= wave:
        return made["half_wave"]
    if heads <= wave:
        return made["wave"]
    # The sum of partials takes 156 registers where 4 heads share keys, 126 where 8 do: 3 programs of 4 warps fit, or 4.
    # The near sum takes 154 there, so it is left out where a fourth counts; where 4 heads share keys it takes 124.
    large = group >= 8
    if heads <= 2 * wave:
        return made["two_waves_large" if large and 2 * heads > 3 * wave else "two_waves"]
    if heads <= 3 * wave:
        return made["three_waves"]
    if heads <= 4 * wave and large:
        return made["four_waves_large"]
    return made["four_waves" if 7 * wave < 2 * heads <= 8 * wave else "more"]


def streamed(group: int, kv_heads: int, seqs: int, alone: bool, table: str = DEFAULT) -> bool:
    """Whether `seqs` sequences of one query, `alone` in their step, take the kernel that streams their keys.

    It leaves a multiprocessor no shared memory, so prompts could not run beside it.
    """
    known = numbers(table, OP)
    first, last = known["streamed_seqs"]
    return alone and first <= seqs <= last and [group, kv_heads] in known["streamed_heads"]


def many_queries(tokens: int, queries: int, max_context: int, table: str) -> bool:
    """Whether so many gain by the kernel of prompts: fewer do where nobody has many keys, else splitting keys pays."""
    known = numbers(table, OP)
    least = known["short_tokens"] if max_context <= known["short_context"] else known["prompt_tokens"]
    return bool(queries >= known["prompt_queries"] and tokens >= least)


def _fitting(problem: SingleProblem | LongerProblem, tile: Tile, held: int) -> Tile:
    """What of the tile fits the GPU. held: rows that it has to hold at least."""
    channels = max(16, next_power_of_2(problem.channels))
    return fitting_tile(tile, problem.dtype, channels, problem.shared, max(16, next_power_of_2(held)))


def split_cut(problem: SingleProblem, tile: Tile) -> Cut:
    """Sequences of one query, with that tile."""
    group, kv_heads, seqs = problem.group, problem.kv_heads, problem.seqs
    tile = _fitting(problem, tile, group)
    return cut(tile, group, kv_heads, seqs, seqs, problem.max_context, True, problem.multiprocessors)


def invariant_tile(problem: LongerProblem) -> Tile:
    """A warp alone, where its rows hold all queries of a sequence, and sequences fill the GPU twice over. Of heads of
    128 in bfloat16, for which equal bits were shown on an H200 (docs/experiments)."""
    fits = problem.queries * problem.group <= INVARIANT_WARP.rows
    fills = problem.seqs * problem.kv_heads >= 2 * problem.multiprocessors
    known = problem.dtype == torch.bfloat16 and problem.channels == 128
    return INVARIANT_WARP if fits and fills and known else INVARIANT


def tiles_cut(problem: LongerProblem, tile: Tile, whole: bool = False) -> Cut:
    """Longer sequences, with that tile. whole: none has more queries than it."""
    tile = _fitting(problem, tile, problem.group * (problem.queries if whole else 1))
    sizes = (problem.group, problem.kv_heads, problem.seqs, problem.tokens, problem.max_context)
    return cut(tile, *sizes, False, problem.multiprocessors, not problem.deterministic, whole)


def _split_cut(problem: SingleProblem) -> Cut:
    dtype, group, kv_heads, channels, seqs, *_ = problem
    tile = attention_tile(dtype, group, max(16, next_power_of_2(channels)), 1, True, seqs, kv_heads, problem.table)
    return split_cut(problem, tile)


def whole_tile(problem: LongerProblem) -> Tile:
    """A tile for all queries of a sequence and a kv head. Measured on an H200."""
    dtype, group, kv_heads, channels, seqs, _, queries, *_ = problem
    wide = max(16, next_power_of_2(channels))
    if next_power_of_2(queries * group) > 16 or dtype == torch.float32 or wide > 128:
        return replace(attention_tile(dtype, group, wide, queries, False, seqs, kv_heads, problem.table), near=8)
    made = tiles(problem.table, OP, "decode_tiles", Tile)
    return made["wave" if seqs * kv_heads <= numbers(problem.table, OP)["wave"] else "four_waves"]


def _whole_cut(problem: LongerProblem) -> Cut:
    return tiles_cut(problem, whole_tile(problem), whole=True)


def _not_whole(problem: LongerProblem) -> str | None:
    if problem.deterministic:
        return "its sums depend on how keys are cut"
    rows, wave = next_power_of_2(problem.queries * problem.group), numbers(problem.table, OP)["wave"]
    if rows > WHOLE_ROWS:
        return f"for sequences of {WHOLE_ROWS} rows at most: queries times heads that share keys"
    if rows > 16 and problem.seqs * problem.kv_heads > wave:
        return f"for up to {wave} tiles of more than 16 rows"
    return None


def _tiles_cut(problem: LongerProblem) -> Cut:
    if problem.deterministic:
        return tiles_cut(problem, invariant_tile(problem))
    dtype, group, kv_heads, channels, seqs, _, queries, *_rest = problem
    tile = attention_tile(
        dtype, group, max(16, next_power_of_2(channels)), queries, False, seqs, kv_heads, problem.table
    )
    return tiles_cut(problem, tile)


def _not_streamed(problem: SingleProblem) -> str | None:
    if not problem.plain:
        return "has no window, soft cap or sinks"
    if not streamed(problem.group, problem.kv_heads, problem.seqs, problem.alone, problem.table):
        known = numbers(problem.table, OP)
        heads = " or ".join(f"{group * kv_heads} of {kv_heads}" for group, kv_heads in known["streamed_heads"])
        least, most = known["streamed_seqs"]
        return f"for {least} to {most} sequences that are alone in their step, with {heads} heads"
    return None


def _not_stream(problem: SingleProblem) -> str | None:
    why = _not_streamed(problem)
    if why is None and not problem.streams:
        why = "needs Hopper, a 16-bit cache of heads of 128 and of the engine's blocks"
    return why


def _not_stream_fp8(problem: SingleProblem) -> str | None:
    why = _not_streamed(problem)
    if why is None and not problem.streams_fp8:
        why = "needs Hopper, an 8-bit cache of heads of 128 and of the engine's blocks"
    return why


def _not_prompts(problem: LongerProblem) -> str | None:
    if problem.deterministic:
        return "its sums depend on how prompts are cut"
    if problem.windowed:
        return "has no window"
    if not many_queries(problem.tokens, problem.queries, problem.max_context, problem.table):
        known = numbers(problem.table, OP)
        short = f"{known['short_tokens']} of contexts up to {known['short_context']}"
        return f"for {known['prompt_tokens']} queries and more, {short}"
    return None


def _not_prompt(problem: LongerProblem) -> str | None:
    why = _not_prompts(problem)
    if why is None and not problem.prompts:
        why = "needs Hopper, a cache of the queries' 16-bit type, and heads of 64 or 128"
    return why


def _not_upcast(problem: LongerProblem) -> str | None:
    why = _not_prompts(problem)
    if why is None and not problem.upcasts:
        why = "needs Hopper, an 8-bit cache of heads of 64 or 128, and a known, small enough sum of contexts"
    return why


def _stream(operands: Operands, _: Any = None) -> None:
    workspace, out, q, k_cache, v_cache, table, batch, scale, *_rest = operands
    given = (k_cache, v_cache, table, batch.context_len, out, arrivals(workspace), scale, batch.num_single)
    stream.attend_decode(workspace, q, *given)


def _stream_fp8(operands: Operands, _: Any = None) -> None:
    workspace, out, q, k_cache, v_cache, table, batch, scale, *_rest = operands
    given = (k_cache, v_cache, table, batch.context_len, out, arrivals(workspace), scale, batch.num_single)
    stream_fp8.attend_decode(workspace, q, *given, operands.scales)


def _prompt(operands: Operands, _: Any = None) -> None:
    workspace, out, q, k_cache, v_cache, table, batch, scale, _, softcap, sinks, scales = operands
    lengths, singles = (batch.query_start, batch.context_len), batch.num_single
    rest = (singles, len(batch.context_len) - singles, batch.max_query)
    attend_prompts(workspace, q, k_cache, v_cache, table, *lengths, out, scale, *rest, softcap, sinks, scales)


def _upcast(operands: Operands, _: Any = None) -> None:
    workspace, q, batch = operands.workspace, operands.q, operands.batch
    caches = (operands.k_cache, operands.v_cache, operands.block_table, batch.context_len)
    held = upcast(workspace, *caches, q.dtype, batch.num_single, batch.max_total_context)
    _prompt(operands._replace(k_cache=held.k, v_cache=held.v, block_table=held.table))


SINGLES: Dispatch[SingleProblem] = Dispatch(
    [
        Variant(
            "persistent",
            _not_stream,
            lambda problem: None,
            _stream,
            "docs/experiments/2026-11-20-decode-attention.md (attention-stream.jsonl)",
        ),
        Variant(
            "persistent_fp8",
            _not_stream_fp8,
            lambda problem: None,
            _stream_fp8,
            "the thresholds of `persistent`, docs/experiments/2026-11-20-decode-attention.md",
        ),
        Variant(
            "split",
            lambda problem: None,
            _split_cut,
            attend_tiles,
            "docs/experiments/2026-11-20-decode-attention.md (attention-tiles.json, attention-rows.jsonl)",
        ),
    ]
)

LONGER: Dispatch[LongerProblem] = Dispatch(
    [
        Variant(
            "invariant",
            lambda problem: None if problem.deterministic else "for runtime.deterministic",
            _tiles_cut,
            attend_tiles,
            "not the fastest: each output is the same sum in any batch; docs/performance.md, batch invariance",
        ),
        Variant(
            "whole",
            _not_whole,
            _whole_cut,
            attend_tiles,
            "docs/experiments/2026-11-27-attention-of-drafted-entries.md",
        ),
        Variant(
            "prompt",
            _not_prompt,
            lambda problem: None,
            _prompt,
            "docs/experiments/2026-11-21-prompt-attention.md (attention-prompts.json)",
        ),
        Variant(
            "upcast_prompt",
            _not_upcast,
            lambda problem: None,
            _upcast,
            "the thresholds of `prompt`, docs/experiments/2026-11-21-prompt-attention.md",
        ),
        Variant(
            "tiles",
            lambda problem: None,
            _tiles_cut,
            attend_tiles,
            "what nothing else takes; docs/experiments/2026-11-21-prompt-attention.md",
        ),
    ]
)
