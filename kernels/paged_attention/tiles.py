"""How attention with split keys is cut, and its launch: a Triton kernel for sequences of one query and for chunks of
prompts (`attend`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import CacheScales
from kernels.paged_attention.attend import attend
from kernels.pipeline import AttentionTile, fitting_attention
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

MAX_SPLITS = 64
_ARRIVALS = 1 << 14
MIN_SEQS = 128

# Programs that a grid of decode sequences may hold for each that would do: sequences of very different length still
# spread.
SPARE = 8


class Operands(NamedTuple):
    """What kernels are launched on; q's heads are dense. Outputs go to `out`."""

    workspace: Workspace
    out: torch.Tensor
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    batch: AttentionBatch
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    scales: CacheScales


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut: rows (queries × heads of a group) and keys a tile, warps, pipeline depth (`fitting_tile`).

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


class Cut(NamedTuple):
    """A launch over `seqs` sequences, those of one query each (`single`) or the last ones of the batch.

    whole: whether each sequence is one tile; queries of a tile; tiles of all sequences; splits that one's keys may
    have; programs that keys are split for; rows whose partials are kept; whether splits are dealt out by number.
    """

    tile: Tile
    single: bool
    whole: bool
    seqs: int
    queries: int
    tiles: int
    splits: int
    programs: int
    rows: int
    dealt: bool


T = TypeVar("T", bound=Tile)


def fitting_tile(tile: T, dtype: torch.dtype, channels: int, shared: int, fewest: int) -> T:
    """The tile, or what of it fits blocks of `shared` bytes of shared memory. channels: of keys and values the wider,
    padded. fewest: rows that a tile may not go below. A cache of smaller numbers than the queries' takes less."""
    size, wide = dtype.itemsize, dtype == torch.float32
    # Weights of the keys pass between warps where these share rows. In float32 no tensor core takes part: numbers of
    # rows pass between warps too.
    weight = size if wide or tile.rows < 16 * tile.warps else 0
    given = AttentionTile(tile.rows, tile.keys, tile.stages)
    made = fitting_attention(given, 2 * channels * size, channels * size + (4 if wide else 0), weight, shared, fewest)
    return tile if made == given else replace(tile, rows=made.rows, keys=made.keys, stages=made.stages)


def cut(
    tile: Tile,
    group: int,
    kv_heads: int,
    seqs: int,
    tokens: int,
    max_context: int,
    single: bool,
    multiprocessors: int,
    splits: bool = True,
    whole: bool = False,
) -> Cut:
    """For `seqs` sequences of `tokens` queries in all. splits: whether keys may be split. whole: none has more queries
    than a tile."""
    whole = whole or single
    programs = tile.programs * multiprocessors
    queries = 1 if single else tile.rows // group
    tiles = seqs if whole else tokens // queries + seqs
    spare = SPARE * programs if whole else programs
    most = min(power_below(spare // (tiles * kv_heads)), next_power_of_2(cdiv(max_context, tile.keys)))
    most = max(1, min(most, MAX_SPLITS)) if splits else 1
    rows = next_power_of_2(group) if single else tile.rows
    programs = dealt_to(programs, tiles * kv_heads) if tile.rounded else programs
    return Cut(tile, single, whole, seqs, queries, tiles, most, programs, rows, tile.dealt and whole and most > 1)


def dealt_to(programs: int, tiles: int) -> int:
    """Of `programs` that run at once, how many the keys of `tiles` kv heads of decode sequences are dealt out to,
    rounded.

    Sequences of equal length have a whole number of splits each, or those left over would take a second wave; a quarter
    of a split is left for longer sequences, so that they are not cut for a few keys. A sequence much longer is cut
    further.
    """
    return programs if tiles > programs else programs // tiles * tiles - tiles // 4


def power_below(n: int) -> int:
    """The largest power of two that is not above n, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def arrivals(workspace: Workspace, single: bool = True) -> torch.Tensor:
    """Counters that every merge leaves at zero; sequences of one query and others may run at once."""
    return workspace.counters("splits of single sequences" if single else "splits of longer sequences", _ARRIVALS)


def attend_tiles(operands: Operands, made: Cut) -> None:
    """`paged_attention` of the cut's sequences."""
    workspace, out, q, k_cache, v_cache, block_table, batch, scale, window, softcap, sinks, scales = operands
    _, h, d = q.shape
    _, g, block_size, dv = v_cache.shape
    tile, splits, seqs, single, rows = made.tile, made.splits, made.seqs, made.single, made.rows
    block_d, block_dv = max(16, next_power_of_2(d)), max(16, next_power_of_2(dv))
    pdl = workspace.pdl
    work = (made.tiles * g, splits, rows) if splits > 1 else (1, 1, 1)
    partial = torch.empty((*work, dv), dtype=torch.float32, device=q.device)
    lse = torch.empty(work, dtype=torch.float32, device=q.device)
    # Sequences have as many splits as `programs` have work, and at most one more each.
    grid = (g, made.tiles + cdiv(made.programs, g)) if made.dealt else (made.tiles, g, splits)
    workspace.launch(attend, grid)(
        q, k_cache, v_cache, block_table, batch.query_start, batch.context_len, sinks if sinks is not None else q, out,
        partial, lse, arrivals(workspace, single), q.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        block_table.stride(0), scale * scales.k, softcap if softcap is not None else 0.0,
        window if window is not None else 0, scales.v, 0 if single else len(batch.context_len) - seqs, seqs, splits,
        made.programs, tile.least,
        H=h, G=g, GROUP=h // g, D=d, DV=dv, BLOCK_SIZE=block_size, BLOCK_M=tile.rows, BLOCK_Q=made.queries,
        BLOCK_N=tile.keys, BLOCK_D=block_d, BLOCK_DV=block_dv,
        BLOCK_B=max(MIN_SEQS, next_power_of_2(seqs)) if made.whole and splits > 1 else 1,
        ROWS=rows, SPLITS=1 if splits == 1 else MAX_SPLITS, MERGE=tile.merged(rows * block_dv),
        IS_NEAR=tile.near > 0, IS_SINGLE=single, IS_WHOLE=made.whole, IS_DEALT=made.dealt,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl, launch_pdl=pdl,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
