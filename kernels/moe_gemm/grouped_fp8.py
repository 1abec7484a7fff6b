# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of many pairs with their experts' matrices of 8-bit floats on Hopper, in Gluon.

Tiles, lists and turns are those of `grouped`, with 128 outputs a tile. With scales by blocks a slice of 128 inputs has
scales of its own, so that its sums leave the tensor cores and are added up in float32 (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2), which takes a second and a third set of registers. Scales by rows come behind all sums.

The first product fetches its inputs row by row from where the tokens stand; one launch gates, quantizes and scales what
it gives for the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.epilogue import emit, halves
from kernels.hopper.mma import ring_product, scaled_product
from kernels.hopper.ring import cursor, ring_of
from kernels.hopper.schedule import told
from kernels.moe_gemm.feed import feed_pairs
from kernels.moe_gemm.order import Places
from kernels.moe_gemm.tiles import combined
from kernels.quantize.kernel import quantized
from kernels.sizes import cdiv
from kernels.weight import Fp8, Weight
from kernels.workspace import Workspace

# Pairs and outputs of a tile, inputs of a slice, which share a scale.
PAIRS, OUTPUTS, INPUTS = 128, 128, 128
# Rows and columns of a box of results.
BOX = 64
# Registers of a thread before they are dealt out anew: 65,536 over three groups of warps, in steps of 8.
REGISTERS = 168


@gluon.jit
def _product(
    tokens, xs, ws, x_ring, w_ring, ring, at, first, pairs, outputs, column, slices, xs_row, xs_group, ws_row,
    HALF: gl.constexpr, FIRST: gl.constexpr, N: gl.constexpr, GATHER: gl.constexpr, BLOCKED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Sums of box HALF of a tile's pairs, whose places are from `first` on, by N outputs from FIRST on of its column,
    and where the ring stands then. ws: where the scales of the expert's first output stand."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    place = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, mma))
    row = first + place
    if GATHER:
        row = gl.load(tokens + row, mask=place < pairs, other=0)
    rows = xs + row.to(gl.int64) * xs_row
    if BLOCKED:
        acc, at = scaled_product(
            x_ring, w_ring, ring, at, slices, rows, ws + column * ws_row, xs_group, HALF, FIRST, N, GATHER, STAGES
        )
    else:
        n = column * 128 + FIRST + gl.arange(0, N, gl.SliceLayout(0, mma))
        scale = gl.load(rows)
        w_scale = gl.load(ws + n * ws_row, mask=n < outputs, other=0.0)
        acc = gl.zeros((64, N), gl.float32, mma)
        acc, at = ring_product(acc, x_ring, w_ring, ring, at, slices, HALF, FIRST, GATHER, STAGES)
        acc = acc * scale[:, None] * w_scale[None, :]
    return acc, at


@gluon.jit
def _multiply(
    y_desc, tokens, xs, ws, x_ring, w_ring, out, ring, tasks, outputs, columns, slices, xs_row, xs_group, ws_matrix,
    ws_row, GATHER: gl.constexpr, BLOCKED: gl.constexpr, STAGES: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """One group of warps: its part of every tile of its program, which is 64 pairs by all outputs, or of a tile of up
    to 64 pairs all of them by half of the outputs."""
    at = cursor(columns * 0)
    ring.wait(at)
    work = told(tasks.index(at.stage * 3), 4)
    while work >= 0:
        pairs = told(tasks.index(at.stage * 3 + 1), 4)
        expert = told(tasks.index(at.stage * 3 + 2), 4)
        first = work // columns * 128
        column = work % columns
        scales = ws + expert.to(gl.int64) * ws_matrix
        if pairs > 64:
            acc, at = _product(
                tokens, xs, scales, x_ring, w_ring, ring, at, first, pairs, outputs, column, slices, xs_row, xs_group,
                ws_row, TEAM, 0, 128, GATHER, BLOCKED, STAGES,
            )  # fmt: skip
            emit(y_desc, out, 2 * TEAM, first + TEAM * 64, (column * 128, column * 128 + 64), halves(acc, 64))
        else:
            some, at = _product(
                tokens, xs, scales, x_ring, w_ring, ring, at, first, pairs, outputs, column, slices, xs_row, xs_group,
                ws_row, 0, TEAM * 64, 64, GATHER, BLOCKED, STAGES,
            )  # fmt: skip
            emit(y_desc, out, 2 * TEAM, first, (column * 128 + TEAM * 64,), (some,))
        ring.wait(at)
        work = told(tasks.index(at.stage * 3), 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "tiles", "columns", "slices", "expert_rows"])
def grouped_fp8_kernel(
    x, x_desc, w_desc, y_desc, xs, ws, tokens, tile_expert, tile_pairs, ends, turns, num_experts, tiles, columns,
    slices, hidden, expert_rows, xs_row, xs_group, ws_matrix, ws_row,
    GATHER: gl.constexpr, BLOCKED: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[place] = x · matrix, for `columns` columns of tiles.

    An expert has expert_rows rows of the matrix. GATHER: x [T, hidden] is read at the place's token, else x_desc at the
    place; so are its scales xs, xs_row and xs_group apart. ws: of 128 rows by 128 inputs (BLOCKED), or of rows.
    `tiles` bounds the number of tiles; `turns`: a zero.
    """
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, 64, 128], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 128, 128], w_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [4, 64, 64], y_desc.layout)
    ring = ring_of(STAGES, 129 if GATHER else 1, 2)
    tasks = gl.allocate_shared_memory(gl.int32, [STAGES * 3, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    works = gl.load(ends + num_experts - 1) * columns
    gl.warp_specialize(
        [
            (_multiply, (y_desc, tokens, xs, ws, x_ring, w_ring, out, ring, tasks, expert_rows, columns, slices,
                         xs_row, xs_group, ws_matrix, ws_row, GATHER, BLOCKED, STAGES, 0)),
            (_multiply, (y_desc, tokens, xs, ws, x_ring, w_ring, out, ring, tasks, expert_rows, columns, slices,
                         xs_row, xs_group, ws_matrix, ws_row, GATHER, BLOCKED, STAGES, 1)),
            (feed_pairs, (x, x_desc, w_desc, tokens, tile_expert, tile_pairs, turns, x_ring, w_ring, ring, tasks,
                          works, tiles - 1, columns, slices, hidden, expert_rows, 0, GATHER, False, 3, STAGES)),
        ],
        [4, 4] if GATHER else [4, 1],
        [224, 56] if GATHER else [240, 24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupedFp8Tile:
    """How the kernel goes about its tiles. stages: depth of the ring."""

    stages: int = 5


def grouped_fp8_fits(x: torch.Tensor, gate_up: Weight, down: Weight, fast_sums: bool) -> bool:
    """Whether the kernel takes both tables: in whole slices of inputs, with scales of 128 by 128 numbers in whole
    blocks, or of rows where `fast_sums` are allowed. On Hopper, for 16-bit inputs."""
    if not group_products(x.device) or x.element_size() != 2:
        return False
    return _reads(gate_up, fast_sums) and _reads(down, fast_sums) and gate_up.shape[1] % (2 * BOX) == 0


def _reads(table: Weight, fast_sums: bool) -> bool:
    if not isinstance(table, Fp8):
        return False
    (_, n, k), number = table.data.shape, table.inputs
    if table.block == (1, k):
        scaled = fast_sums and not number.group
    else:
        scaled = table.block == (OUTPUTS, INPUTS) and number.group == INPUTS and n % OUTPUTS == 0
    whole = k % INPUTS == 0 and table.data.is_contiguous() and table.scale.is_contiguous()
    return whole and scaled and number.number == "fp8"


def grouped_fp8_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Fp8,
    down: Fp8,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    places: Places,
    tile: GroupedFp8Tile,
) -> torch.Tensor:
    """`moe_gemm` for many pairs of each expert, whose `places` are in tiles of PAIRS, where `grouped_fp8_fits`. Every
    shape that a launch depends on is known to the host, so that graphs can hold it."""
    e, rows = gate_up.data.shape[0], places.tiles * PAIRS
    lists = (places.tokens, places.tile_expert, places.tile_pairs, places.ends)

    def product(
        source: torch.Tensor, scales: torch.Tensor, table: Fp8, gathers: bool, turns: torch.Tensor
    ) -> torch.Tensor:
        matrix, (_, outputs, size) = table.data.flatten(0, 1), table.data.shape
        y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        columns = cdiv(outputs, OUTPUTS)
        workspace.launch(grouped_fp8_kernel, (min(multiprocessors(x.device), places.tiles * columns),))(
            source, boxes(source, BOX, INPUTS), boxes(matrix, OUTPUTS, INPUTS), boxes(y, BOX, BOX),
            scales, table.scale, *lists, turns, e, places.tiles, columns, size // INPUTS, size, outputs,
            *scales.stride(), *table.scale.stride()[:2],
            GATHER=gathers, BLOCKED=table.block[0] > 1, STAGES=tile.stages, PDL=workspace.pdl,
            num_warps=4, maxnreg=REGISTERS, launch_pdl=workspace.pdl,
        )  # fmt: skip
        return y

    first, second = places.turns.unbind()
    numbers, scales = quantized(workspace, x, gate_up.inputs, by_row=True)
    both = product(numbers, scales, gate_up, True, first)
    numbers, scales = quantized(workspace, both, down.inputs, activation=activation, limit=limit, by_row=True)
    y = product(numbers, scales, down, False, second)
    return combined(workspace, y, places.rows, experts, weights, residual, e, x.dtype)
