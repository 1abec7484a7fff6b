# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Which tiles a program takes.

Static: `range(program, tiles, programs)`, in bands (`banded`), or back and forth (`turn_place`), where tiles differ and
come the longest first. Stream-K (Osama et al. 2023, arXiv:2301.03598): the slices of all tiles stand in one row, and
every program takes an equal range of these units (`first_unit`, `unit_owner`, `next_unit`). By a counter of all
programs: one warp takes the next tile and tells the others through shared memory (`tell`, `told`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.sizes import cdiv

# Shared memory of a multiprocessor, which its programs share.
SHARED_BYTES = 233472


@gluon.jit
def plus(a, b):
    """Of two partial sums their sum, for a scan."""
    return a + b


@gluon.jit
def first_unit(program, units, programs):
    """The first unit of a program's range."""
    return program * units // programs


@gluon.jit
def unit_owner(unit, units, programs):
    """The program whose range holds `unit`."""
    return ((unit + 1) * programs - 1) // units


@gluon.jit
def next_unit(tile, slice_, slices):
    """Tile and slice behind a slice of a tile."""
    slice_ += 1
    tile = gl.where(slice_ == slices, tile + 1, tile)
    return tile, gl.where(slice_ == slices, 0, slice_)


@gluon.jit
def next_slice(slice_, slices):
    """The slice behind another: a tile's first behind its last."""
    slice_ += 1
    return gl.where(slice_ == slices, 0, slice_)


@gluon.jit
def banded(tile, row_tiles, column_tiles, BAND: gl.constexpr):
    """Row and column of a tile: bands of BAND rows of tiles, down each column of a band in turn."""
    band = tile // (BAND * column_tiles)
    inside = tile % (BAND * column_tiles)
    high = min(row_tiles - band * BAND, BAND)
    return band * BAND + inside % high, inside // high


@gluon.jit
def turn_place(turn, program, programs):
    """The number of the tile that a program takes in its `turn`: forth in even turns, back in odd ones."""
    return turn * programs + program + turn % 2 * (programs - 1 - 2 * program)


@gluon.jit
def tile_spot(number, seqs, G: gl.constexpr):
    """kv group, sequence and rank of tile `number`: rank 0 holds a sequence's last queries, which see the most keys."""
    return number % G, number // G % seqs, number // G // seqs


@gluon.jit
def query_tile(number, seqs, first_seq, p_query_start, p_context, G: gl.constexpr, QUERIES: gl.constexpr,
               BLOCK_N: gl.constexpr):  # fmt: skip
    """Tile `number`: the last tiles of all sequences come first, then those before them.

    Gives its sequence, kv group, first token, first query within the sequence (negative when there is no such tile),
    the sequence's queries and keys, and how many tiles of keys the queries see.
    """
    group, place, rank = tile_spot(number, seqs, G)
    seq = first_seq + place
    token = gl.load(p_query_start + seq)
    count = gl.load(p_query_start + seq + 1) - token
    length = gl.load(p_context + seq)
    query = ((count + QUERIES - 1) // QUERIES - 1 - rank) * QUERIES
    stop = gl.minimum(length, gl.maximum(length - count, 0) + query + QUERIES)
    tiles = gl.where(query < 0, 0, (stop + BLOCK_N - 1) // BLOCK_N)
    return seq, group, token, query, count, length, tiles


@gluon.jit
def tell(place, value, WARPS: gl.constexpr):
    """Writes a number for other warps into a place [1] of shared memory."""
    place.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def told(place, WARPS: gl.constexpr):
    """The number that stands in a place."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@dataclass(frozen=True, slots=True)
class Work:
    """What the programs of a launch write: `y` [M, n], and, where they share tiles of outputs, `partials` of these
    (else `y` again)."""

    programs: int
    shared: bool
    y: torch.Tensor
    partials: torch.Tensor


def work_of(
    x: torch.Tensor, n: int, rows: int, outputs: int, inputs: int, wide: int, split: int, most: int,
    dtype: torch.dtype | None = None,
) -> Work:  # fmt: skip
    """The work of x [M, k] and n outputs in tiles of `rows` by `outputs`, cut into slices of `inputs`: for `split`
    programs a tile, or for up to `most` that take equal ranges of all slices. A program has a partial tile, or
    `wide` of them, for its first and for its last tile. dtype: y's; None is x's."""
    m, k = x.shape
    tiles, slices = cdiv(m, rows) * cdiv(n, outputs), cdiv(k, inputs)
    programs = min(tiles * slices, tiles * split if split else most)
    shared = programs > tiles or tiles % programs != 0
    y = torch.empty((m, n), dtype=dtype or x.dtype, device=x.device)
    cells = 2 * programs * wide * outputs * rows
    return Work(programs, shared, y, torch.empty(cells, dtype=torch.float32, device=x.device) if shared else y)
