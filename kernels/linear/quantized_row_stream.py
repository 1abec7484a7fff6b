# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of one to four rows with a large weight of packed 4-bit integers on Hopper, in Gluon.

Weights stream through shared memory, and work is cut, as in `quantized_stream`. What differs leaves the multiprocessor
time for four programs at once. Rows do not come with the weights: each program puts its part of them in shared memory
once, one row normed, in the order in which an operand of the matrix instructions takes it, with the sum of each block
of 128 inputs. The eight columns of a matrix instruction hold the rows, each as often as it fits, so that a weight costs
as many instructions as with one. An integer's bits with an exponent before them are 128 or 1024 more than the integer;
that, and the zero point, are taken off a block's sums by the sum of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import sync, view
from kernels.hopper.epilogue import close_tile
from kernels.hopper.ring import barriers, cursor, load_weights
from kernels.hopper.schedule import SHARED_BYTES, first_unit, next_slice, next_unit, work_of
from kernels.linear.held_rows import rows_alone, rows_memory, rows_of, stage_rows, totals_of
from kernels.linear.packed_groups import is_fine, quarter_sums, quarters_layout, unit_groups
from kernels.linear.packed_operand import bytes_layout, integers_of, quarters_of, row_layout, row_of
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import PackedInt
from kernels.workspace import Workspace

# Inputs of a block.
WIDTH = 128
# The most rows, and the most inputs of a row that is normed.
MAX_ROWS, MAX_NORMED = 4, 8192
# Of shared memory, what a program has beside ring, rows and sums, at most.
RESERVED_BYTES = 1024 + 256
# Of a multiprocessor: fewer wait for each other's words.
MIN_WARPS = 8


@gluon.jit
def _stage(x, g, offset, held, totals, NORM: gl.constexpr, OFFSET: gl.constexpr, FINE: gl.constexpr):
    """Stores blocks [H, 128] of a row, with NORM times the norm's weight, in the order of `row_of`, and their sums for
    every column; FINE: the sums of their quarters."""
    H: gl.constexpr = x.shape[0]
    COMING: gl.constexpr = x.type.layout
    if NORM:
        by = g.to(gl.float32) + offset if OFFSET else g.to(gl.float32)
        x = (x.to(gl.float32) * by).to(x.dtype)
    if FINE:
        totals.store(gl.reshape(gl.sum(gl.reshape(x.to(gl.float32), (H, 4, 32)), axis=2), (H * 4,)))
    else:
        sums = gl.expand_dims(gl.sum(x.to(gl.float32), axis=1), 1)
        totals.store(gl.reshape(sums + gl.zeros([H, 8], gl.float32, COMING), (H * 8,)))
    # [H, quarter, word, which of two that are four apart, half, pair of bytes in a word]
    x = gl.reshape(x.to(gl.int16, bitcast=True), (H, 4, 4, 2, 2, 2))
    held.store(gl.reshape(gl.permute(x, (0, 2, 1, 5, 4, 3)), (H * 128,)))


@gluon.jit
def _column(acc, FINE: gl.constexpr, MMA: gl.constexpr):
    """[BN, 8] of eight equal columns as [BN, 1]; FINE: [BN, 4], sums of quarters."""
    if FINE:
        one = gl.convert_layout(gl.sum(acc, axis=1), gl.SliceLayout(1, MMA))
    else:
        one = gl.sum(acc, axis=1) * 0.125
    return gl.expand_dims(one, 1)


@gluon.jit
def _scaled(w, x, total, groups, PLACE: gl.constexpr, DTYPE: gl.constexpr, ZERO: gl.constexpr, QUARTERS: gl.constexpr,
            LEFT: gl.constexpr):  # fmt: skip
    """A block's sums of quarters [BN, 4], of bytes w of integers, whose scales stand at PLACE of `groups`; total [4]:
    of inputs."""
    BN: gl.constexpr = w.shape[0]
    ADDED: gl.constexpr = 128.0 if gl.bfloat16 == DTYPE else 1024.0
    off = groups[PLACE + 1].to(gl.float32) + ADDED if ZERO else ADDED + 8.0
    SUMS: gl.constexpr = LEFT.parent
    part = mma_v2(integers_of(w, DTYPE, LEFT), x, gl.zeros((BN, 8), gl.float32, SUMS))
    return (quarter_sums(part, QUARTERS) - gl.expand_dims(total, 0) * off) * groups[PLACE].to(gl.float32)


@gluon.jit
def quantized_row_stream_kernel(
    x_ptr, norm_ptr, w_desc, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    N, K, G, eps, offset, M, x_stride, residual_stride, ROWS: gl.constexpr,
    BN: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, ROW: gl.constexpr,
    GROUP: gl.constexpr, ZERO: gl.constexpr, NORM: gl.constexpr, OFFSET: gl.constexpr, SHARED: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See `kernels.linear.stream.stream_kernel`. A unit is BLOCKS times 128 inputs; N is a multiple of BN and K of a
    unit.

    ROWS: a power of two that the M rows fit in, up to 4; of more than one none is normed. HELD: of one row, a power
    of two that the blocks of a program's units fit in; of more, its units, or those of a tile where it has more.
    ROW: a power of two that a row to be normed fits in. GROUP: inputs that share a scale of the weight, a multiple
    of 128, or of one row 64 or 32; 0: all. ZERO: the weight has zero points.

    In groups of 64 or 32, each of the matrix instructions' columns holds a quarter of a block of the row alone. So
    quarters have sums of their own. A unit's scales are asked for a unit ahead.
    """
    FINE: gl.constexpr = is_fine(GROUP)
    WIDE: gl.constexpr = 1 if ACT is None else 2
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    BYTES: gl.constexpr = BN * WIDE * 64 * BLOCKS
    # what an integer's bits stand for beside it
    ADDED: gl.constexpr = 128.0 if gl.bfloat16 == DTYPE else 1024.0
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    bytes_: gl.constexpr = bytes_layout(BN, WARPS)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    coming: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    whole: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # of groups of a block: their sums, quarters of each, what one has of a row of a unit
    quarters: gl.constexpr = quarters_layout(BN, WARPS)
    by_quarter: gl.constexpr = gl.SliceLayout(2, quarters)
    QUARTERS: gl.constexpr = GROUP // 32 if FINE else 1
    TENSORS: gl.constexpr = WIDE * (2 if ZERO else 1)
    SUMS: gl.constexpr = 4 if FINE else 8

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = K // (128 * BLOCKS)
    units = N // BN * slices
    first = first_unit(program, units, programs)
    stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS * WIDE, BN, 64], w_desc.layout)
    bars = barriers(STAGES, 1)
    if ROWS == 1:
        held = gl.allocate_shared_memory(gl.int16, [HELD * 128], plain)
        totals = gl.allocate_shared_memory(gl.float32, [HELD * SUMS], plain)
    else:
        held = gl.allocate_shared_memory(gl.int16, [HELD, BLOCKS * ROWS * 128], rows_memory(ROWS, BLOCKS))
        totals = gl.allocate_shared_memory(gl.float32, [HELD, BLOCKS * ROWS], plain)
    fence_async_shared()
    ask_tile = first // slices
    ask_slice = first % slices
    if ROWS == 1:
        place = gl.arange(0, HELD, gl.SliceLayout(1, coming))
        at_slice = (ask_slice + place // BLOCKS) % slices
        spot = (at_slice * BLOCKS + place % BLOCKS)[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, coming))[
            None, :
        ]
        live = (place < (stop - first) * BLOCKS)[:, None]
    for stage in gl.static_range(STAGES):
        load_weights(w_desc, bars, w_ring, stage, ask_tile, N, ask_slice, first + stage < stop, BYTES, BN, BLOCKS, WIDE)
        ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
    if FINE:
        offsets = gl.arange(0, 4, gl.SliceLayout(0, by_quarter)) // QUARTERS
        ahead_tile = first // slices
        ahead_slice = first % slices
        rows = (ahead_tile * BN + gl.arange(0, BN, gl.SliceLayout(1, by_quarter))).to(gl.int64)
        up = N.to(gl.int64)
        ahead = unit_groups(
            scale_ptr, zero_ptr, rows, up, offsets, G, ahead_slice * BLOCKS, BLOCKS, 4 // QUARTERS, WIDE, ZERO
        )
    if ROWS == 1:
        g = gl.load(norm_ptr + spot, mask=live, other=0.0) if NORM else spot
        if PDL:
            gdc_wait()
        given = gl.load(x_ptr + spot, mask=live, other=0.0)
        factor = 1.0
        if NORM:
            k = gl.arange(0, ROW, whole)
            row = gl.load(x_ptr + k, mask=k < K, other=0.0).to(gl.float32)
            factor = gl.rsqrt(gl.sum(row * row, axis=0) / K + eps)
        _stage(given, g, offset, held, totals, NORM, OFFSET, FINE)
        x_blocks = view(held, gl.int16, [HELD, 128], plain)
        x_sums = view(totals, gl.float32, [HELD, SUMS], plain)
    else:
        stage_rows(x_ptr, held, totals, first % slices, slices, stop - first, M, x_stride, ROWS, BLOCKS, PDL)
        x_blocks = view(held, gl.int16, [HELD * BLOCKS, ROWS * 128], rows_memory(ROWS))
        x_sums = view(totals, gl.float32, [HELD * BLOCKS, ROWS], plain)

    at = cursor(first * 0)
    turn = first * 0
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        if FINE:
            acc = gl.zeros((BN, 4), gl.float32, by_quarter)
        else:
            acc = gl.zeros((BN, 8), gl.float32, mma)
            n = (tile * BN + gl.arange(0, BN, gl.SliceLayout(1, mma))).to(gl.int64)
            scale_row = scale_ptr + n * G
            zero_row = zero_ptr + n * G if ZERO else scale_row
            up = N.to(gl.int64) * G
        acc_up = acc
        for unit in range(begin, end):
            if FINE:
                groups = ahead
                ahead_tile, ahead_slice = next_unit(ahead_tile, ahead_slice, slices)
                following = ahead_tile * BN + gl.arange(0, BN, gl.SliceLayout(1, by_quarter))
                following = gl.where(unit + 1 < stop, following, -1).to(gl.int64)
                ahead = unit_groups(
                    scale_ptr, zero_ptr, following, up, offsets, G, ahead_slice * BLOCKS, BLOCKS, 4 // QUARTERS, WIDE,
                    ZERO,
                )  # fmt: skip
            for block in gl.static_range(BLOCKS):
                number = (unit - tile * slices) * BLOCKS + block
                if not FINE:
                    group = number * 128 // GROUP if GROUP > 0 else number * 0
                    scale = gl.load(scale_row + group)
                    scale_up = gl.load(scale_row + up + group) if WIDE == 2 else scale
                    if ZERO:
                        off = gl.expand_dims(gl.load(zero_row + group).to(gl.float32) + ADDED, 1)
                        off_up = off
                        if WIDE == 2:
                            off_up = gl.expand_dims(gl.load(zero_row + up + group).to(gl.float32) + ADDED, 1)
                    else:
                        off = ADDED + 8.0
                        off_up = off
                mine = (unit - first) * BLOCKS + block if ROWS == 1 else turn * BLOCKS + block
                if ROWS == 1:
                    held_row = x_blocks.index(mine).load(gl.SliceLayout(0, row_layout(WARPS)))
                if ROWS > 1:
                    x = rows_of(x_blocks.index(mine), ROWS, DTYPE, right)
                    total = gl.expand_dims(totals_of(x_sums.index(mine), ROWS, columns), 0)
                elif FINE:
                    x = quarters_of(held_row, DTYPE, WARPS, right)
                    quarter_total = x_sums.index(mine).load(gl.SliceLayout(0, by_quarter))
                else:
                    x = row_of(held_row, DTYPE, WARPS, right)
                    total = gl.expand_dims(x_sums.index(mine).load(columns), 0)
                if block == 0:
                    mbarrier.wait(bars.index(at.stage), at.phase)
                box = (at.stage * BLOCKS + block) * WIDE
                if FINE:
                    w = w_ring.index(box).load(bytes_)
                    acc += _scaled(w, x, quarter_total, groups, block * TENSORS, DTYPE, ZERO, quarters, left)
                    if WIDE == 2:
                        w = w_ring.index(box + 1).load(bytes_)
                        acc_up += _scaled(
                            w, x, quarter_total, groups, block * TENSORS + TENSORS // 2, DTYPE, ZERO, quarters, left
                        )
                else:
                    none = gl.zeros((BN, 8), gl.float32, mma)
                    part = mma_v2(integers_of(w_ring.index(box).load(bytes_), DTYPE, left), x, none)
                    acc += (part - total * off) * gl.expand_dims(scale.to(gl.float32), 1)
                    if WIDE == 2:
                        part = mma_v2(integers_of(w_ring.index(box + 1).load(bytes_), DTYPE, left), x, none)
                        acc_up += (part - total * off_up) * gl.expand_dims(scale_up.to(gl.float32), 1)
            sync()
            more = unit + STAGES < stop
            load_weights(w_desc, bars, w_ring, at.stage, ask_tile, N, ask_slice, more, BYTES, BN, BLOCKS, WIDE)
            ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
            at = at.next(STAGES)
            turn = next_slice(turn, HELD) if ROWS > 1 else turn
        if ROWS == 1:
            close_tile(
                _column(acc, FINE, mma) * factor, _column(acc_up, FINE, mma) * factor, tile, begin, end, slices, units,
                bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr, 1, N, N, N, SHARED, ACT, BIAS, RESIDUAL,
            )  # fmt: skip
        else:
            close_tile(
                rows_alone(acc, ROWS), rows_alone(acc_up, ROWS), tile, begin, end, slices, units,
                bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr, M, N, N, residual_stride, SHARED, ACT, BIAS,
                RESIDUAL,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowStreamTile:
    """How `quantized_row_stream_kernel` is cut: outputs of a tile (behind an activation, of gate and of up each),
    inputs of a stage, stages, programs of a multiprocessor, warps."""

    outputs: int
    inputs: int
    stages: int
    programs: int
    warps: int = 4

    def units(self, shape: tuple[int, ...], gated: bool, count: int) -> int:
        """Units of inputs of `count` multiprocessors' programs that meet different inputs, at most."""
        tiles, slices = shape[0] // (self.outputs * (2 if gated else 1)), shape[1] // self.inputs
        return min(slices, cdiv(tiles * slices, min(tiles * slices, self.programs * count)))

    def fitting(self, shape: tuple[int, ...], gated: bool, rows: int, count: int) -> RowStreamTile | None:
        """With as many stages and programs as fit into the shared memory of each of `count` multiprocessors beside so
        many rows, and no more than these; None where that leaves a ring of one stage, or few warps."""
        high = next_power_of_2(rows)
        stage = self.outputs * self.inputs // 2 * (2 if gated else 1)
        for programs in range(self.programs, cdiv(MIN_WARPS, self.warps) - 1, -1):
            tile = replace(self, programs=programs)
            held = tile.units(shape, gated, count) * (self.inputs // WIDTH) * high * (2 * WIDTH + 4)
            # the sums of a tile pass through it too
            free = SHARED_BYTES // programs - RESERVED_BYTES - held - 4 * self.outputs * high
            if free >= 2 * stage:
                return replace(tile, stages=min(self.stages, free // stage))
        return None


def whole_tiles(shape: tuple[int, ...], gated: bool, tile: RowStreamTile) -> bool:
    """Whether a weight of this shape is whole tiles of outputs and whole stages of inputs."""
    rows, k = shape
    return rows % (tile.outputs * (2 if gated else 1)) == 0 and k % tile.inputs == 0


def packed_row_stream(
    workspace: Workspace, x: torch.Tensor, weight: PackedInt, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float, offset: float, residual: torch.Tensor | None,
    activation: str | None, tile: RowStreamTile, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear` of one row that `quantized_vector.reads_packed` and `quantized_stream.streams_packed` take, or of up to
    8, in groups of whole blocks, that `streams_packed` takes, of a weight of whole tiles. The tile is one of `fitting`
    for more than one row. counts: zeros, one for each tile of outputs, left zero."""
    gated, (m, k) = activation is not None, x.shape
    n, rows = weight.shape[0] // (2 if gated else 1), next_power_of_2(m)
    count, blocks = multiprocessors(x.device), tile.inputs // WIDTH
    work = work_of(x, n, rows, tile.outputs, tile.inputs, 2 if gated else 1, 0, tile.programs * count)
    if rows == 1:
        units = cdiv(n // tile.outputs * (k // tile.inputs), work.programs)
        held = next_power_of_2(max(units * blocks, tile.warps))
    else:
        held = tile.units(weight.shape, gated, count)
    workspace.launch(quantized_row_stream_kernel, (work.programs,))(
        x, norm_weight, boxes(weight.data, tile.outputs, WIDTH // 2), weight.scale, weight.zero, bias, residual,
        work.y, work.partials, counts,
        n, k, weight.scale.shape[-1], eps, offset, m, x.stride(0), residual.stride(0) if residual is not None else 0,
        ROWS=rows, BN=tile.outputs, BLOCKS=blocks, STAGES=tile.stages, HELD=held,
        ROW=next_power_of_2(k), GROUP=0 if weight.group >= k else weight.group, ZERO=weight.zero is not None,
        NORM=norm_weight is not None, OFFSET=offset != 0.0, SHARED=work.shared, ACT=activation,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl,
        num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
