# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of many pairs with their experts' matrices on Hopper, in Gluon: a group of warps reads, two multiply.

A tile is up to 128 pairs that share an expert, by 256 rows of its matrix. The pairs of a tile stand together and tiles
one after another (`order.placed`), so that between the two products, and behind them, whole tiles are written and read
by the bulk copy engine (TMA); only the first product fetches its inputs row by row from where the tokens stand. Copies
run ahead across the boundaries of tiles, as far as the ring in shared memory allows.

Each group of four warps multiplies 64 pairs by all 256 rows. A tile of 64 pairs or fewer takes half of the time: there
each group takes half of the rows. Since tiles differ, a program takes its next one from a counter of all programs. What
a group made of a tile is written while it multiplies the next one, else both groups would leave the matrix unit idle.

Bound by reading the matrices below about a hundred pairs an expert, and from a few thousand tokens on by the power that
the chip may draw: its clock falls, and fewer cycles save less. Rows of a tile without a pair are zeros, not fetched.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.epilogue import halves
from kernels.hopper.mma import begin_slice, end_slice, ring_product
from kernels.hopper.ring import cursor, ring_of
from kernels.hopper.schedule import told
from kernels.moe_gemm.feed import feed_pairs
from kernels.moe_gemm.order import Places
from kernels.moe_gemm.results import first_part, kept_of, last_part, rounded
from kernels.moe_gemm.tiles import combined
from kernels.sizes import cdiv
from kernels.workspace import Workspace

# Pairs of a tile, inputs of a slice; a box of the copy engine is 64 × 64, or a tile's rows of one matrix by 64.
PAIRS, ROWS, BOX = 128, 256, 64
# Slices that shared memory holds.
STAGES = 4
# Slices of a tile within which the one before is written, if it has as many.
PARTS = 2
# Registers of a thread before they are dealt out anew: 65,536 over three groups of warps, in steps of 8.
REGISTERS = 168


@gluon.jit
def _product(
    y_desc, x_ring, w_ring, out, ring, at, slices, row, column, other, kept, limit,
    HALF: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, ACT: gl.constexpr, LIMITED: gl.constexpr,
    GATHER: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """A tile's sums, of box HALF of its pairs by ROWS rows of the matrix from FIRST on, and where the ring stands then.
    What was kept of the tile before is written while the first slices are multiplied."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc = gl.zeros((64, ROWS), gl.float32, mma)
    token = begin_slice(acc, x_ring, w_ring, ring, at, HALF, FIRST, GATHER)
    remaining = first_part(y_desc, out, row, column, kept, limit, ACT, LIMITED, TEAM)
    if PARTS == 2:
        acc, at = end_slice(token, ring, at, STAGES)
        token = begin_slice(acc, x_ring, w_ring, ring, at, HALF, FIRST, GATHER)
    last_part(y_desc, out, row, column, other, remaining, ACT, TEAM)
    acc, at = end_slice(token, ring, at, STAGES)
    return ring_product(acc, x_ring, w_ring, ring, at, slices - PARTS, HALF, FIRST, GATHER, STAGES)


@gluon.jit
def _multiply(
    y_desc, x_ring, w_ring, out, ring, tasks, columns, slices, limit,
    ACT: gl.constexpr, LIMITED: gl.constexpr, GATHER: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    TEAM: gl.constexpr,
):  # fmt: skip
    """One group of warps: its part of every tile of its program, which is 64 pairs by all rows of the matrix, or of a
    tile of up to 64 pairs all of them by half of the rows."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    # before the first tile there is none, and a short one has half of the boxes: what lies outside is not written
    NOWHERE: gl.constexpr = 1 << 30
    WIDTH: gl.constexpr = 128 if ACT is None else 64
    none = columns * 0
    at = cursor(none)
    row = none + NOWHERE
    column = none
    other = none
    left, right = halves(gl.zeros((64, 256), gl.float32, mma), 128)
    layout: gl.constexpr = right.type.layout
    kept = kept_of(y_desc, left, right, limit, ACT, LIMITED)
    ring.wait(at)
    task = told(tasks.index(at.stage), 4)
    while task >= 0:
        if (task & 1) == 1:
            acc, at = _product(
                y_desc, x_ring, w_ring, out, ring, at, slices, row, column, other, kept, limit,
                TEAM, 0, 256, ACT, LIMITED, GATHER, PARTS, STAGES, TEAM,
            )  # fmt: skip
            left, right = halves(acc, 128)
            kept = kept_of(y_desc, left, right, limit, ACT, LIMITED)
            row = (task >> 1) // columns * 128 + TEAM * 64
            column = (task >> 1) % columns * (2 * WIDTH)
            other = column + WIDTH
        else:
            some, at = _product(
                y_desc, x_ring, w_ring, out, ring, at, slices, row, column, other, kept, limit,
                0, TEAM * 128, 128, ACT, LIMITED, GATHER, PARTS, STAGES, TEAM,
            )  # fmt: skip
            row = (task >> 1) // columns * 128
            column = (task >> 1) % columns * (2 * WIDTH) + TEAM * WIDTH
            other = row * 0 + NOWHERE
            if ACT is not None:
                kept = kept[0], gl.convert_layout(some, layout)
                column, other = other, column
            else:
                few = rounded(y_desc, some, limit, ACT, LIMITED)
                kept = few + few
        ring.wait(at)
        task = told(tasks.index(at.stage), 4)
    remaining = first_part(y_desc, out, row, column, kept, limit, ACT, LIMITED, TEAM)
    last_part(y_desc, out, row, column, other, remaining, ACT, TEAM)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "tiles", "columns", "slices", "expert_rows", "up_row"])
def grouped_kernel(
    x, x_desc, w_desc, y_desc, tokens, tile_expert, tile_pairs, ends, turns, num_experts, tiles, columns, slices,
    hidden, expert_rows, up_row, limit,
    GATHER: gl.constexpr, ACT: gl.constexpr, LIMITED: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y[place] = act(x · gate) ∘ (x · up), or x · matrix without ACT, for `columns` columns of tiles.

    An expert has expert_rows rows of the matrix, those of up begin up_row behind those of gate. GATHER: x [T, hidden]
    is read at the place's token, else x_desc at the place. `tiles` bounds the number of tiles; `turns`: a zero.
    """
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, 64, 64], y_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 256, 64], w_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [4, 64, 64], y_desc.layout)
    ring = ring_of(STAGES, 129 if GATHER else 1, 2)
    tasks = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    works = gl.load(ends + num_experts - 1) * columns
    gl.warp_specialize(
        [
            (_multiply, (y_desc, x_ring, w_ring, out, ring, tasks, columns, slices, limit,
                         ACT, LIMITED, GATHER, PARTS, STAGES, 0)),
            (_multiply, (y_desc, x_ring, w_ring, out, ring, tasks, columns, slices, limit,
                         ACT, LIMITED, GATHER, PARTS, STAGES, 1)),
            (feed_pairs, (x, x_desc, w_desc, tokens, tile_expert, tile_pairs, turns, x_ring, w_ring, ring, tasks,
                          works, tiles - 1, columns, slices, hidden, expert_rows, up_row,
                          GATHER, ACT is not None, 1, STAGES)),
        ],
        [4, 4] if GATHER else [4, 1],
        [232, 40] if GATHER else [240, 24],
    )  # fmt: skip


def grouped_fits(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Whether the copy engine can read and write all of it, in whole slices of inputs."""
    sizes = x.shape[1], gate_up.shape[1] // 2
    return group_products(x.device) and x.element_size() == 2 and all(size % BOX == 0 for size in sizes)


def grouped_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    places: Places,
) -> torch.Tensor:
    """`moe_gemm` for many pairs of each expert, whose `places` are in tiles of PAIRS, where `grouped_fits`. Every shape
    that a launch depends on is known to the host, so that graphs can hold it."""
    hidden, inter, e = x.shape[1], gate_up.shape[1] // 2, gate_up.shape[0]
    rows = places.tiles * PAIRS
    h = torch.empty(rows, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    lists = (places.tokens, places.tile_expert, places.tile_pairs, places.ends)

    def product(
        source: torch.Tensor, table: torch.Tensor, target: torch.Tensor, act: str | None, turns: torch.Tensor
    ) -> None:
        matrix, size = table.flatten(0, 1), table.shape[2]
        columns = cdiv(target.shape[1], ROWS if act is None else ROWS // 2)
        workspace.launch(grouped_kernel, (min(multiprocessors(x.device), places.tiles * columns),))(
            source, boxes(source, BOX, BOX), boxes(matrix, ROWS if act is None else BOX, BOX), boxes(target, BOX, BOX),
            *lists, turns, e, places.tiles, columns, size // BOX, size, table.shape[1], inter,
            0.0 if limit is None else limit,
            GATHER=act is not None, ACT=act, LIMITED=limit is not None, PARTS=min(PARTS, size // BOX),
            STAGES=STAGES, PDL=workspace.pdl,
            num_warps=4, maxnreg=REGISTERS, launch_pdl=workspace.pdl,
        )  # fmt: skip

    first, second = places.turns.unbind()
    product(x, gate_up, h, activation, first)
    product(h, down, y, None, second)
    return combined(workspace, y, places.rows, experts, weights, residual, e, x.dtype)
