"""Tiles of batch-invariant products: an output is the same sum in the same order, whatever rows stand beside it.

A weight's sizes alone say into how many splits its inputs are cut. The tensor cores add up a split 16 inputs at a time,
in any tile and with either side as the weight's, and the partials are added in turn: by the last of the programs that
share a tile of few rows (`stream`), by each program of many rows (`persistent`). Where Hopper's copy engine has no part
in it, slices do the same in one kernel (`skinny`).
"""

from __future__ import annotations

import torch

from kernels.linear.persistent import UNIT, PersistentTile
from kernels.linear.skinny import Tile
from kernels.linear.stream import StreamTile
from kernels.sizes import cdiv, next_power_of_2

# Rows of the widest streamed tile; behind an activation, whose tiles hold two sums.
STREAM_ROWS = 128
# Rows that the tiles of more are chosen by: the next power of two within these, as a warm-up passes each.
CHOSEN_ROWS = (256, 8192)
# By warpgroups, what 64 rows of a tile take: 192 rows read less than 128.
COSTS = {2: 1.0, 3: 0.96}
# Splits, inputs of one, outputs of a streamed tile.
MAX_SPLITS, MIN_INPUTS, OUTPUTS = 4, 512, 64
# Bytes of a ring of one program a multiprocessor, and of two.
WHOLE_RING, HALF_RING = 200 << 10, 104 << 10


def splits(n: int, k: int, gated: bool, multiprocessors: int) -> int:
    """Of the inputs: as many as give each multiprocessor a program when rows are few. A gated output has one."""
    return 1 if gated else max(1, min(multiprocessors // cdiv(n, OUTPUTS), MAX_SPLITS, k // MIN_INPUTS))


def few_rows_tile(rows: int, n: int, k: int, gated: bool, multiprocessors: int) -> StreamTile:
    """For up to `STREAM_ROWS`. Slices have one width, for splits begin at slices. Where there are more gated tiles than
    multiprocessors, a program takes several."""
    height = next(h for h in (8, 16, 32, 64, STREAM_ROWS) if rows <= h)
    split, tiles = splits(n, k, gated, multiprocessors), cdiv(n, OUTPUTS)
    slice_bytes = (OUTPUTS * (2 if gated else 1) + height) * UNIT * 2
    whole = gated and tiles > multiprocessors and height < STREAM_ROWS
    one = whole or tiles * split <= multiprocessors or 2 * slice_bytes > HALF_RING
    room = WHOLE_RING if one else HALF_RING
    return StreamTile(height, OUTPUTS, UNIT, min(room // slice_bytes, 12), split=split, whole=whole)


def many_rows_tile(rows: int, n: int, k: int, multiprocessors: int) -> PersistentTile:
    """Of 128 or 192 rows, by what the waves of tiles take."""
    cut, fewest, most = splits(n, k, False, multiprocessors), *CHOSEN_ROWS
    chosen = min(max(next_power_of_2(rows), fewest), most)

    def cost(tile: PersistentTile) -> float:
        tiles = cdiv(chosen, 64 * tile.teams) * cdiv(n, tile.outputs)
        return cdiv(tiles, multiprocessors) * tile.teams * COSTS[tile.teams]

    return min((PersistentTile(cut), PersistentTile(cut, teams=3, stages=4)), key=cost)


def tile(rows: int, n: int, activation: str | None, dtype: torch.dtype) -> Tile:
    """Of the kernel of any GPU. Programs that share a gated output's inputs would have to share both of its halves:
    those take one slice.

    Few rows take a slice a program, many rows take the slices one after another. float32 has no room for the deepest
    pipelines.
    """
    slices = 4 if n <= 4096 and activation is None else 1
    narrow = dtype != torch.float32
    if rows <= 256:
        height = 16 if rows <= 16 else 64 if rows <= 64 else 128
        stages = (4 if activation else 6) if narrow else 3
        return Tile(height, 64, 64, split=slices, stages=stages, swap=True, prefetch=256)
    wide = narrow and slices == 1 and activation is None
    return Tile(128, 256 if wide else 128, 64, serial=slices, stages=3, warps=8)
