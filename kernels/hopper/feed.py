# mypy: disable-error-code="no-untyped-def,attr-defined"
"""A warp of its own that fills a ring, as far ahead as that has stages."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.compat import load_box
from kernels.hopper.ring import filling_cursor, load_gate_up
from kernels.hopper.schedule import banded


@gluon.jit
def feed_teams(x_desc, w_desc, x_ring, w_ring, ring, row_tiles, column_tiles, slices, up_row, BN: gl.constexpr,
               BK: gl.constexpr, WIDE: gl.constexpr, TEAMS: gl.constexpr, STAGES: gl.constexpr,
               BAND: gl.constexpr):  # fmt: skip
    """Asks for the slices of all tiles of a program, in bands. A stage holds a box of 64 rows of x for each team, and
    BN rows of the weight; with WIDE of 2, BN of gate and, up_row behind them, BN of up."""
    BYTES: gl.constexpr = (TEAMS * 64 + WIDE * BN) * BK * 2
    program = gl.program_id(0)
    at = filling_cursor(program * 0)
    for tile in range(program, row_tiles * column_tiles, gl.num_programs(0)):
        row, column = banded(tile, row_tiles, column_tiles, BAND)
        for slice_ in range(slices):
            bar = ring.acquire(at, BYTES)
            for team in gl.static_range(TEAMS):
                load_box(x_desc, [(row * TEAMS + team) * 64, slice_ * BK], bar, x_ring.index(at.stage * TEAMS + team))
            load_gate_up(w_desc, column * BN, up_row, slice_ * BK, bar, w_ring.index(at.stage), True, WIDE)
            at = at.next(STAGES)
