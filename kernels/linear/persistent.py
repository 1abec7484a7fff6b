# mypy: disable-error-code="no-untyped-def,attr-defined"
"""A product of many rows on Hopper, in Gluon, whose sums are those of `stream`: what batch-invariant steps take.

Tiles are walked and fed as in `gated_persistent`. An output is the sum of SPLITS partials in the order of the inputs,
each of which the tensor cores add up 16 inputs at a time: as programs that share a tile of few rows add up theirs. The
splits begin where `stream`'s do. A residual's box comes by the copy engine while the products run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_box, sync
from kernels.hopper.epilogue import emit
from kernels.hopper.feed import feed_teams
from kernels.hopper.mma import team_product
from kernels.hopper.ring import barriers, cursor, ring_of
from kernels.hopper.schedule import banded, first_unit
from kernels.sizes import cdiv
from kernels.workspace import Workspace

# Inputs of a slice, and those of a unit that splits are counted in.
INPUTS, UNIT = 64, 128
# By warpgroups that multiply, registers of a thread before they are dealt out anew, and after: 65,536 over them and the
# group of the warp that asks.
REGISTERS = {2: (168, 240), 3: (128, 160)}
FEEDER_REGISTERS = 24


@gluon.jit
def _multiply(residual_desc, y_desc, bias_ptr, x_ring, w_ring, out, ring, arrived, row_tiles, column_tiles, slices, N,
              SPLITS: gl.constexpr, BN: gl.constexpr, UNIT_SLICES: gl.constexpr, TEAMS: gl.constexpr,
              STAGES: gl.constexpr, BAND: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
              TEAM: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of every tile of its program."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    units = (slices + UNIT_SLICES - 1) // UNIT_SLICES
    program = gl.program_id(0)
    at = cursor(program * 0)
    turn = program * 0
    for tile in range(program, row_tiles * column_tiles, gl.num_programs(0)):
        row, column = banded(tile, row_tiles, column_tiles, BAND)
        if RESIDUAL:
            # into the place that the tile before was written from, once that has been read
            tma.store_wait(0)
            sync()
            mbarrier.expect(arrived.index(TEAM), 64 * BN * 2)
            load_box(residual_desc, [(row * TEAMS + TEAM) * 64, column * BN], arrived.index(TEAM), out.index(TEAM))
        y = gl.zeros((64, BN), gl.float32, mma)
        if SPLITS == 1:
            y, at = team_product(y, x_ring, w_ring, ring, at, slices, slices > 0, TEAM, TEAMS, STAGES)
        else:
            for split in range(SPLITS):
                begin = first_unit(split, units, SPLITS) * UNIT_SLICES
                end = gl.minimum(first_unit(split + 1, units, SPLITS) * UNIT_SLICES, slices)
                count = end - begin
                acc = gl.zeros((64, BN), gl.float32, mma)
                acc, at = team_product(acc, x_ring, w_ring, ring, at, count, count > 0, TEAM, TEAMS, STAGES)
                y += acc

        if BIAS:
            n = column * BN + gl.arange(0, BN, gl.SliceLayout(0, mma))
            y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
        if RESIDUAL:
            mbarrier.wait(arrived.index(TEAM), turn & 1)
            y += out.index(TEAM).load(mma).to(gl.float32)
            turn += 1
        emit(y_desc, out, TEAM, (row * TEAMS + TEAM) * 64, (column * BN,), (y.to(y_desc.dtype),))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "row_tiles", "column_tiles", "slices"])
def persistent_kernel(
    x_desc, w_desc, residual_desc, y_desc, bias_ptr, N, row_tiles, column_tiles, slices,
    SPLITS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, UNIT_SLICES: gl.constexpr, TEAMS: gl.constexpr,
    STAGES: gl.constexpr, BAND: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    REGISTERS: gl.constexpr, FEEDER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of 64·TEAMS rows and BN of N outputs; places outside of a matrix read as zero and are not written.
    `slices` of BK inputs; the partials of SPLITS splits are added up, each of whole units of UNIT_SLICES."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * TEAMS, 64, BK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [TEAMS, 64, BN], y_desc.layout)
    ring = ring_of(STAGES, 1, TEAMS)
    arrived = barriers(TEAMS, 1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if TEAMS == 2:
        gl.warp_specialize(
            [
                (_multiply, (residual_desc, y_desc, bias_ptr, x_ring, w_ring, out, ring, arrived, row_tiles,
                             column_tiles, slices, N, SPLITS, BN, UNIT_SLICES, TEAMS, STAGES, BAND, BIAS, RESIDUAL, 0)),
                (_multiply, (residual_desc, y_desc, bias_ptr, x_ring, w_ring, out, ring, arrived, row_tiles,
                             column_tiles, slices, N, SPLITS, BN, UNIT_SLICES, TEAMS, STAGES, BAND, BIAS, RESIDUAL, 1)),
                (feed_teams, (x_desc, w_desc, x_ring, w_ring, ring, row_tiles, column_tiles, slices, 0,
                              BN, BK, 1, TEAMS, STAGES, BAND)),
            ],
            [4, 1],
            [REGISTERS, FEEDER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (residual_desc, y_desc, bias_ptr, x_ring, w_ring, out, ring, arrived, row_tiles,
                             column_tiles, slices, N, SPLITS, BN, UNIT_SLICES, TEAMS, STAGES, BAND, BIAS, RESIDUAL, 0)),
                (_multiply, (residual_desc, y_desc, bias_ptr, x_ring, w_ring, out, ring, arrived, row_tiles,
                             column_tiles, slices, N, SPLITS, BN, UNIT_SLICES, TEAMS, STAGES, BAND, BIAS, RESIDUAL, 1)),
                (_multiply, (residual_desc, y_desc, bias_ptr, x_ring, w_ring, out, ring, arrived, row_tiles,
                             column_tiles, slices, N, SPLITS, BN, UNIT_SLICES, TEAMS, STAGES, BAND, BIAS, RESIDUAL, 2)),
                (feed_teams, (x_desc, w_desc, x_ring, w_ring, ring, row_tiles, column_tiles, slices, 0,
                              BN, BK, 1, TEAMS, STAGES, BAND)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FEEDER_REGISTERS],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PersistentTile:
    """How `persistent_kernel` goes about its tiles.

    splits: of the inputs, whose partials are added up. teams: warpgroups of 64 rows each, 2 or 3. outputs: of a tile,
    128, or 256 with one split and two teams. stages: depth of the ring. band: rows of tiles in a band.
    """

    splits: int
    teams: int = 2
    outputs: int = 128
    stages: int = 5
    band: int = 16


def persistent_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, tile: PersistentTile,
) -> torch.Tensor:  # fmt: skip
    """`linear` without norm and activation, for many rows and 8·i outputs; rows of x, weight and residual stand on 16
    bytes."""
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = cdiv(m, 64 * tile.teams), cdiv(n, tile.outputs)
    before, after = REGISTERS[tile.teams]
    written = boxes(y, 64, tile.outputs)
    workspace.launch(persistent_kernel, (min(multiprocessors(x.device), row_tiles * column_tiles),))(
        boxes(x, 64, INPUTS), boxes(weight, tile.outputs, INPUTS),
        written if residual is None else boxes(residual, 64, tile.outputs), written, bias,
        n, row_tiles, column_tiles, cdiv(k, INPUTS),
        SPLITS=tile.splits, BN=tile.outputs, BK=INPUTS, UNIT_SLICES=UNIT // INPUTS, TEAMS=tile.teams,
        STAGES=tile.stages, BAND=tile.band, BIAS=bias is not None, RESIDUAL=residual is not None, REGISTERS=after,
        FEEDER_REGISTERS=FEEDER_REGISTERS, PDL=workspace.pdl,
        num_warps=4, maxnreg=before, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return y
