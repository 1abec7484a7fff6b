# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The gated product of many rows on Hopper, in Gluon: the wide result of gate and up is never written.

One program a multiprocessor walks over tiles of 128 rows. A warp of its own asks the bulk copy engine (TMA) for slices
of x and of the weight, as far ahead as the ring in shared memory allows, across the boundaries of tiles too. Each of
two warpgroups multiplies 64 rows of a tile by all of its columns and writes its results on its own, so that one's
epilogue falls into the other's products. Half of a tile's columns are rows of gate and half the same rows of up, in one
operand of the tensor cores, so that a thread holds both of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.epilogue import activate, emit, halves
from kernels.hopper.feed import feed_teams
from kernels.hopper.mma import team_product
from kernels.hopper.ring import cursor, ring_of
from kernels.hopper.schedule import banded
from kernels.linear.stream import streams
from kernels.linear.waves import OUTPUTS, ROWS
from kernels.sizes import cdiv
from kernels.workspace import Workspace

# Inputs of a slice. Of a tile's rows each warpgroup has 64.
INPUTS = 64
# Registers of a thread before they are dealt out anew: 65,536 over three warpgroups, in steps of 8.
REGISTERS = 168


@gluon.jit
def _multiply(y_desc, x_ring, w_ring, out, ring, row_tiles, column_tiles, slices,
              ACT: gl.constexpr, BN: gl.constexpr, TEAMS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
              TEAM: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of every tile of its program."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BN, 16])
    program = gl.program_id(0)
    at = cursor(program * 0)
    for tile in range(program, row_tiles * column_tiles, gl.num_programs(0)):
        acc = gl.zeros((64, 2 * BN), gl.float32, mma)
        acc, at = team_product(acc, x_ring, w_ring, ring, at, slices, True, TEAM, TEAMS, STAGES)

        gate, up = halves(acc, BN)
        y = (activate(gate, ACT) * up).to(y_desc.dtype)
        row, column = banded(tile, row_tiles, column_tiles, BAND)
        emit(y_desc, out, TEAM, (row * TEAMS + TEAM) * 64, (column * BN,), (y,))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "row_tiles", "column_tiles", "slices"])
def gated_persistent_kernel(
    x_desc, w_desc, y_desc, N, row_tiles, column_tiles, slices,
    BN: gl.constexpr, BK: gl.constexpr, TEAMS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    ACT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """N counts outputs, the weight has 2N rows. Tiles of 64·TEAMS rows and BN outputs; places outside of a matrix read
    as zero and are not written."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * TEAMS, 64, BK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2 * BN, BK], w_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [TEAMS, 64, BN], y_desc.layout)
    ring = ring_of(STAGES, 1, TEAMS)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gl.warp_specialize(
        [
            (_multiply, (y_desc, x_ring, w_ring, out, ring, row_tiles, column_tiles, slices,
                         ACT, BN, TEAMS, STAGES, BAND, 0)),
            (_multiply, (y_desc, x_ring, w_ring, out, ring, row_tiles, column_tiles, slices,
                         ACT, BN, TEAMS, STAGES, BAND, 1)),
            (feed_teams, (x_desc, w_desc, x_ring, w_ring, ring, row_tiles, column_tiles, slices, N,
                          BN, BK, 2, TEAMS, STAGES, BAND)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GatedPersistentTile:
    """How `gated_persistent_kernel` goes about its tiles: depth of the ring, rows of tiles in a band."""

    stages: int = 4
    band: int = 16


def gated_persistent_fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the bulk copy engine can read and write all of it."""
    return bias is None and streams(x, weight) and weight.shape[0] % 16 == 0


def gated_persistent_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, activation: str, tile: GatedPersistentTile
) -> torch.Tensor:
    """`linear` with an activation and without norm and bias, for many rows."""
    m, k = x.shape
    n = weight.shape[0] // 2
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = cdiv(m, ROWS), cdiv(n, OUTPUTS)
    workspace.launch(gated_persistent_kernel, (min(multiprocessors(x.device), row_tiles * column_tiles),))(
        boxes(x, 64, INPUTS), boxes(weight, OUTPUTS, INPUTS), boxes(y, 64, OUTPUTS),
        n, row_tiles, column_tiles, cdiv(k, INPUTS),
        BN=OUTPUTS, BK=INPUTS, TEAMS=ROWS // 64, STAGES=tile.stages, BAND=tile.band, ACT=activation, PDL=workspace.pdl,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return y
