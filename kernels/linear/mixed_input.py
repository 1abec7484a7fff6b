# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Products of tens to hundreds of rows with a weight of packed 4-bit integers on Hopper, in Gluon: a mixed-input GEMM,
whose weight is never written out.

The result is computed as its transpose, so that the weight is the operand that the matrix unit takes from registers.
One warp asks the bulk copy engine (TMA) for packed weights and for x, as far ahead as the ring in shared memory allows.
One or two warpgroups unpack half a block of 128 inputs in registers, scales included, while the matrix unit works on
the half before. Four threads of a row read the same words of it, and each takes its two numbers of every eight. Work is
cut as in `stream`, in tiles of the weight's rows and of x's.

A number times its scale is rounded once, as where weights are written out (`unpack`): both ways multiply the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_box, view
from kernels.hopper.epilogue import combine, in_columns
from kernels.hopper.ring import cursor, ring_of
from kernels.hopper.schedule import first_unit, next_unit, work_of
from kernels.linear.packed_groups import fine
from kernels.linear.quantized_stream import WIDTH, streams_packed
from kernels.weight import PackedInt
from kernels.workspace import Workspace

# Registers of a thread before they are dealt out anew, by warps that multiply: with four more, two programs of 4 or one
# of 8 fill a multiprocessor.
REGISTERS = {4: 128, 8: 168}
# Of a word's eight integers two neighbours, that a selector names, as 16-bit floats: 128 + u by its bits alone (in
# float16 1024 + u), less that and the zero point, by their scale.
_PAIR = """
{
.reg .b32 t;
shr.u32 t, $1, 4;
prmt.b32 t, $1, t, $3;
lop3.b32 t, t, 0x000F000F, MAGIC, 0xEA;
sub.KIND t, t, $6;
mul.KIND $0, t, $5;
}
"""
BF16 = gl.constexpr(_PAIR.replace("KIND", "bf16x2").replace("MAGIC", "0x43004300"))
F16 = gl.constexpr(_PAIR.replace("KIND", "f16x2").replace("MAGIC", "0x64006400"))
# Columns of a tile's sums that go through shared memory together on their way out.
COLUMNS = gl.constexpr(16)


@gluon.constexpr_function
def _operand_layout(rows, warps, words):
    """Of numbers [rows, words, 4, 2]: a thread has two neighbours of each word's eight, as an operand of the matrix
    unit wants them."""
    registers = [[0, 0, 0, 1]] + [[0, 1 << bit, 0, 0] for bit in range(words.bit_length() - 1)] + [[8, 0, 0, 0]]
    registers += [[16 * warps, 0, 0, 0]] if rows > 16 * warps else []
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    among = [[16, 0, 0, 0], [32, 0, 0, 0]] + ([[64, 0, 0, 0]] if warps == 8 else [])
    return gl.DistributedLinearLayout(registers, lanes, among, [], [rows, words, 4, 2])


@gluon.jit
def _half_of(box, HALF: gl.constexpr, NUMBERS: gl.constexpr):
    """Half of a block's words [BN, 8], for four threads each."""
    BN: gl.constexpr = box.shape[0]
    block: gl.constexpr = _operand_layout(BN, gl.num_warps(), 16)
    words = box.load(gl.SliceLayout(2, gl.SliceLayout(3, block)))
    halves = gl.split(gl.permute(gl.reshape(words, (BN, 2, 8)), (0, 2, 1)))
    return gl.convert_layout(halves[HALF], gl.SliceLayout(2, gl.SliceLayout(3, NUMBERS)), assert_trivial=True)


@gluon.jit
def _unpacked(words, scale, zero, NUMBERS: gl.constexpr, OPERAND: gl.constexpr):
    """Words [BN, 8] of integers with their rows' scales and zero points [BN], as an operand [BN, 64]."""
    BN: gl.constexpr = words.shape[0]
    DTYPE: gl.constexpr = scale.dtype
    none = gl.zeros([BN, 8, 4, 2], gl.int32, NUMBERS)
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, NUMBERS))))
    chosen = pair * 0x1111 + 0x4400
    args = [
        words[:, :, None, None] + none,
        chosen[None, None, :, None] + none,
        scale[:, None, None, None] + none.to(DTYPE),
        zero[:, None, None, None] + none.to(DTYPE),
    ]
    if gl.bfloat16 == DTYPE:
        w = gl.inline_asm_elementwise(BF16, "=&r,r,r,r,r,r,r", args, gl.bfloat16, True, 2)
    else:
        w = gl.inline_asm_elementwise(F16, "=&r,r,r,r,r,r,r", args, gl.float16, True, 2)
    return gl.convert_layout(gl.reshape(w, (BN, 64)), OPERAND, assert_trivial=True)


@gluon.jit
def _group_of(scale_ptr, zero_ptr, spots, slice_, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """Scales of a block's rows, whose first ones stand at `spots`, and what an integer's bits are more than its
    number."""
    DTYPE: gl.constexpr = scale_ptr.dtype.element_ty
    group = slice_ * 128 // GROUP if GROUP > 0 else slice_ * 0
    scale = gl.load(scale_ptr + (spots + group))
    if ZERO:
        zero = gl.load(zero_ptr + (spots + group)).to(gl.float32)
    else:
        zero = spots.to(gl.float32) * 0.0 + 8.0
    return scale, (zero + (128.0 if gl.bfloat16 == DTYPE else 1024.0)).to(DTYPE)


@gluon.jit
def _ask_weight(w_desc, full, w_ring, stage, tile, slice_, columns, live, BYTES: gl.constexpr):
    """Asks for a unit's weights; its barrier expects its x too."""
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES, pred=live)
    load_box(w_desc, [tile // columns * w_ring.shape[1], slice_ * 64], bar, w_ring.index(stage), pred=live)


@gluon.jit
def _ask_inputs(x_desc, full, x_ring, stage, tile, slice_, columns, live):
    """Asks for a unit's x, in two boxes of 64 inputs."""
    row = tile % columns * x_ring.shape[1]
    for half in gl.static_range(2):
        box = x_ring.index(2 * stage + half)
        load_box(x_desc, [row, slice_ * 128 + half * 64], full.index(stage), box, pred=live)


@gluon.jit
def _feed(x_desc, w_desc, x_ring, w_ring, ring, first, stop, slices, columns, STAGES: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    """One warp: asks for all units, for the first weights before the kernel before has finished."""
    BYTES: gl.constexpr = w_ring.shape[1] * 64 + x_ring.shape[1] * 256
    tile = first // slices
    slice_ = first % slices
    for place in gl.static_range(STAGES):
        _ask_weight(w_desc, ring.full, w_ring, place, tile, slice_, columns, first + place < stop, BYTES)
        tile, slice_ = next_unit(tile, slice_, slices)
    if PDL:
        gdc_wait()
    tile = first // slices
    slice_ = first % slices
    for place in gl.static_range(STAGES):
        _ask_inputs(x_desc, ring.full, x_ring, place, tile, slice_, columns, first + place < stop)
        tile, slice_ = next_unit(tile, slice_, slices)
    at = cursor(first * 0)
    for _ in range(first + STAGES, stop):
        ring.wait_empty(at)
        _ask_weight(w_desc, ring.full, w_ring, at.stage, tile, slice_, columns, True, BYTES)
        _ask_inputs(x_desc, ring.full, x_ring, at.stage, tile, slice_, columns, True)
        tile, slice_ = next_unit(tile, slice_, slices)
        at = at.next(STAGES)


@gluon.jit
def _write(acc, bias_ptr, residual_ptr, y_ptr, first_row, first_column, M, N, y_stride, residual_stride,
           BIAS: gl.constexpr, RESIDUAL: gl.constexpr):  # fmt: skip
    """Writes sums [BN, BM], of weights from first_row on and of x from first_column on."""
    BN: gl.constexpr = acc.shape[0]
    flat: gl.constexpr = gl.BlockedLayout([8 if BN > 64 else 4, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    n = first_row + gl.arange(0, BN, gl.SliceLayout(1, flat))
    m = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, flat))
    sums = in_columns(acc, COLUMNS)
    adds = ()
    if RESIDUAL:
        for i in gl.static_range(len(sums)):
            at = m + i * COLUMNS
            live = (n < N)[:, None] & (at < M)[None, :]
            spot = residual_ptr + at.to(gl.int64)[None, :] * residual_stride + n[:, None]
            adds = adds + (gl.load(spot, mask=live, other=0.0),)  # noqa: RUF005
    if BIAS:
        bias = gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    for i in gl.static_range(len(sums)):
        at = m + i * COLUMNS
        live = (n < N)[:, None] & (at < M)[None, :]
        y = gl.convert_layout(sums[i], flat)
        if BIAS:
            y += bias[:, None]
        if RESIDUAL:
            y += adds[i].to(gl.float32)
        gl.store(y_ptr + at.to(gl.int64)[None, :] * y_stride + n[:, None], y.to(y_ptr.dtype.element_ty), mask=live)


@gluon.jit
def _multiply(x_ring, w_ring, ring, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
              M, N, G, y_stride, residual_stride, first, stop, slices, units, columns,
              STAGES: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, SHARED: gl.constexpr,
              BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One or two warpgroups: the products of all units, and the results of their tiles."""
    BM: gl.constexpr = x_ring.shape[1]
    BN: gl.constexpr = w_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    numbers: gl.constexpr = _operand_layout(BN, WARPS, 8)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, numbers)))
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    if PDL:
        gdc_wait()
    at = cursor(first * 0)
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        acc = gl.zeros((BN, BM), gl.float32, mma)
        first_row = tile // columns * BN
        # what lies beyond the last row is not written: any scale will do
        spots = gl.minimum(first_row + gl.arange(0, BN, rows), N - 1) * G
        next_scale, next_zero = _group_of(scale_ptr, zero_ptr, spots, begin - tile * slices, GROUP, ZERO)
        for unit in range(begin, end):
            scale, zero = next_scale, next_zero
            # asked for a unit ahead
            following = gl.minimum(unit + 1, end - 1) - tile * slices
            next_scale, next_zero = _group_of(scale_ptr, zero_ptr, spots, following, GROUP, ZERO)
            ring.wait(at)
            box = view(w_ring.index(at.stage), gl.int32, [BN, 16], swizzled)
            w = _unpacked(_half_of(box, 0, numbers), scale, zero, numbers, left)
            token = warpgroup_mma(w, x_ring.index(2 * at.stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[token])
            # the products of the unit before are done: its place is free
            ring.release(at.before(STAGES), live=unit > begin)
            w = _unpacked(_half_of(box, 1, numbers), scale, zero, numbers, left)
            token = warpgroup_mma(w, x_ring.index(2 * at.stage + 1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[token])
            at = at.next(STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        ring.release(at.before(STAGES))

        last = end - begin == slices
        if SHARED and end - begin < slices:
            last, sums = combine((acc,), tile, begin, slices, units, partial_ptr, count_ptr, 1)
            acc = sums[0]
        if last:
            _write(acc, bias_ptr, residual_ptr, y_ptr, first_row, tile % columns * BM, M, N, y_stride,
                   residual_stride, BIAS, RESIDUAL)  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def mixed_input_kernel(
    x_desc, w_desc, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, G, y_stride, residual_stride,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr,
    ZERO: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y [M, N] = x [M, K] · weightᵀ, in tiles of BM rows of x and BN of the weight. A unit is 128 inputs. GROUP: inputs
    that share a scale, a multiple of 128; 0: all. G: scales of a row."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = K // 128
    columns = (M + BM - 1) // BM
    units = (N + BN - 1) // BN * columns * slices
    first = first_unit(program, units, programs)
    stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BN, 64], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, BM, 64], x_desc.layout)
    ring = ring_of(STAGES, 1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, ring, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr,
                         count_ptr, M, N, G, y_stride, residual_stride, first, stop, slices, units, columns,
                         STAGES, GROUP, ZERO, SHARED, BIAS, RESIDUAL, PDL)),
            (_feed, (x_desc, w_desc, x_ring, w_ring, ring, first, stop, slices, columns, STAGES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MixedInputTile:
    """How `mixed_input_kernel` is cut: rows of x and of the weight; units in the ring; warps that multiply, 4 or 8;
    programs of a tile, 0 for equal ranges of all tiles' units to `programs` a multiprocessor."""

    rows: int
    outputs: int
    stages: int
    warps: int = 8
    split: int = 0
    programs: int = 1


def mixed_input_fits(x: torch.Tensor, weight: PackedInt) -> bool:
    """Whether `mixed_input_linear` takes both: what `packed_stream` takes in groups of 128 inputs or multiples of them,
    with scales in x's dtype."""
    held = weight.scale.dtype == x.dtype and weight.scale.numel() < 1 << 31
    return held and not fine(weight) and streams_packed(x, weight)


def mixed_input_linear(
    workspace: Workspace, x: torch.Tensor, weight: PackedInt, bias: torch.Tensor | None,
    residual: torch.Tensor | None, tile: MixedInputTile, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear` without norm and activation, for what `mixed_input_fits` allows; counts as in `packed_stream`."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    m, k = x.shape
    n = weight.shape[0]
    most = tile.programs * multiprocessors(x.device)
    work = work_of(x, n, tile.rows, tile.outputs, WIDTH, 1, tile.split, most)
    workspace.launch(mixed_input_kernel, (work.programs,))(
        boxes(x, tile.rows, WIDTH // 2), boxes(weight.data, tile.outputs, WIDTH // 2), weight.scale, weight.zero,
        bias, residual, work.y, work.partials, counts,
        m, n, k, weight.scale.shape[-1], work.y.stride(0), residual.stride(0) if residual is not None else 0,
        BM=tile.rows, BN=tile.outputs, STAGES=tile.stages, SHARED=work.shared,
        GROUP=0 if weight.group >= k else weight.group, ZERO=weight.zero is not None,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl,
        num_warps=tile.warps, maxnreg=REGISTERS[tile.warps], launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
