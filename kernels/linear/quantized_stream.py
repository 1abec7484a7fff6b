# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of few rows with a weight of packed 4-bit integers or 8-bit floats on Hopper, in Gluon: the weight
streams through shared memory as it is stored.

Work is cut as in `stream`: every program takes an equal range of all tiles' slices (stream-K, arXiv:2301.03598). Each
block of 128 inputs has sums of its own, which are scaled and added up in float32. Integers in groups of 32 or 64 are
scaled before the product, as where weights are written out (`unpack`): both ways multiply the same numbers.

8-bit floats are multiplied as they are, by inputs that are 8-bit floats too. 4-bit integers are unpacked in registers:
a thread reads 16 bytes of a row, 32 inputs, and makes them the operand of its matrix instructions without an exchange
between threads. Which inputs meet in an instruction does not matter, as long as the rows of x are taken in the same
order. Up to 16 rows are put in that order on their way out of shared memory; more rows come ordered from a launch
before (`order_inputs`). An integer u becomes a 16-bit float by its bits alone: 0x4300 | u is 128 + u in bfloat16,
0x6400 | u is 1024 + u in float16 (Kim et al. 2022, arXiv:2211.10017). The difference to the zero point is exact.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_box, sync
from kernels.hopper.epilogue import close_tile
from kernels.hopper.ring import barriers, cursor, load_weights
from kernels.hopper.schedule import first_unit, next_slice, next_unit, work_of
from kernels.linear.packed_groups import LOWERED, fine, is_fine, scaled_integers, unit_groups
from kernels.linear.packed_operand import (
    bytes_layout,
    inputs_layout,
    inputs_of,
    integers_of,
    operand_of,
    scales_layout,
)
from kernels.linear.stream import StreamTile, streams
from kernels.sizes import cdiv
from kernels.weight import Fp8, PackedInt
from kernels.workspace import Workspace

# Inputs of a block.
WIDTH = 128
# Integers: inputs are ordered by a launch of their own beyond the first; the most of them, and with groups of 32 or 64.
FEW_ROWS, MAX_ROWS, FINE_ROWS = 16, 128, 64

_SPLIT = """
{
.reg .b32 a, b, c;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000F000F, MAGIC, 0xEA;
lop3.b32 $1, b, 0x000F000F, MAGIC, 0xEA;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 $2, a, 0x000F000F, MAGIC, 0xEA;
lop3.b32 $3, b, 0x000F000F, MAGIC, 0xEA;
"""
_MIDDLE = """
mov.b32 c, EIGHT;
sub.KIND $0, $0, c;
sub.KIND $1, $1, c;
sub.KIND $2, $2, c;
sub.KIND $3, $3, c;
}
"""
_ZERO = """
sub.KIND $0, $0, $5;
sub.KIND $1, $1, $6;
sub.KIND $2, $2, $5;
sub.KIND $3, $3, $6;
}
"""


def _asm(kind: str, magic: int, rest: str) -> gl.constexpr:
    twice = magic << 16 | magic
    text = (_SPLIT + rest).replace("KIND", f"{kind}x2").replace("MAGIC", hex(twice))
    return gl.constexpr(text.replace("EIGHT", hex(twice | 0x80008)))


BF16_MIDDLE, BF16_ZERO = _asm("bf16", 0x4300, _MIDDLE), _asm("bf16", 0x4300, _ZERO)
F16_MIDDLE, F16_ZERO = _asm("f16", 0x6400, _MIDDLE), _asm("f16", 0x6400, _ZERO)


@gluon.jit
def _integers(bytes_, zero, ZERO: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Bytes [BN, 64] of a row's 128 integers, less their zero points [BN, 64], as an operand [BN, 128] of a product."""
    given: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r" if ZERO else "=&r,=&r,=&r,=&r,r"
    args = [bytes_, zero] if ZERO else [bytes_]
    bf16: gl.constexpr = BF16_ZERO if ZERO else BF16_MIDDLE
    f16: gl.constexpr = F16_ZERO if ZERO else F16_MIDDLE
    if gl.bfloat16 == DTYPE:
        low, high = gl.inline_asm_elementwise(bf16, given, args, (gl.bfloat16, gl.bfloat16), True, 4)
    else:
        low, high = gl.inline_asm_elementwise(f16, given, args, (gl.float16, gl.float16), True, 4)
    return operand_of(low, high, OPERAND)


@gluon.jit
def _ask_inputs(x_desc, bars, x_ring, stage, slice_, live, BLOCKS: gl.constexpr):
    for block in gl.static_range(BLOCKS):
        column = (slice_ * BLOCKS + block) * 128
        load_box(x_desc, [0, column], bars.index(stage), x_ring.index(stage * BLOCKS + block), pred=live)


@gluon.jit
def _scale_of(scale_ptr, rows, N, G, group):
    """Scales of a block, [BN] float32: none beyond the last group or row."""
    found = gl.load(scale_ptr + rows.to(gl.int64) * G + group, mask=(rows < N) & (group < G), other=0.0)
    return found.to(gl.float32)


@gluon.jit
def _taken_off(zero_ptr, rows, N, G, group, ADDED: gl.constexpr, ZERO: gl.constexpr):
    """What a row's integers are more than they stand for, with the ADDED of their bits: [BN, 1] float32."""
    if ZERO:
        zero = gl.load(zero_ptr + rows.to(gl.int64) * G + group, mask=(rows < N) & (group < G), other=0)
        off = gl.expand_dims(zero.to(gl.float32) + ADDED, 1)
    else:
        off = ADDED + 8.0
    return off


@gluon.jit
def _zero_of(zero_ptr, rows, N, G, group, DTYPE: gl.constexpr, BYTES: gl.constexpr):
    """Zero points of a block's bytes and 128 (float16: 1024), [BN, 64]."""
    zero = gl.load(zero_ptr + rows.to(gl.int64) * G + group, mask=(rows < N) & (group < G), other=0).to(gl.float32)
    zero += 128.0 if gl.bfloat16 == DTYPE else 1024.0
    return gl.expand_dims(zero.to(DTYPE), 1) + gl.zeros([rows.shape[0], 64], DTYPE, BYTES)


@gluon.jit
def _add_scaled(
    acc, w, x, groups, PLACE: gl.constexpr, INPUTS: gl.constexpr, BY_SCALES: gl.constexpr, ZERO: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sums acc and a block's, of bytes w of integers, whose scales stand at PLACE of `groups`, and rows of x in shared
    memory."""
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    zero = groups[PLACE + 1 if ZERO else PLACE]
    operand = scaled_integers(w, groups[PLACE], zero, ZERO, not REGISTERS, BY_SCALES, left)
    if REGISTERS:
        acc = mma_v2(operand, inputs_of(x.load(INPUTS), gl.DotOperandLayout(1, mma, 2)), acc)
    else:
        acc = warpgroup_mma(operand, x.permute((1, 0)), acc)
    return acc


@gluon.jit(do_not_specialize=["M", "xs_row", "xs_group"])
def quantized_stream_kernel(
    x_desc, xs_ptr, w_desc, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, G, xs_row, xs_group, y_stride, residual_stride,
    BM: gl.constexpr, BN: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    PACKED: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, ZERO: gl.constexpr, GROUPED: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See `kernels.linear.stream.stream_kernel`. A unit is BLOCKS times 128 inputs.

    GROUP: inputs that share a scale of the weight, a multiple of 128; 0: all. ROWS: outputs that share it. PACKED: the
    weight is 4-bit integers, ZERO: with zero points, and x 16-bit floats; else both are 8-bit floats, and x has a scale
    for 128 inputs of a row (GROUPED), or one a row. Integers may have groups of 32 or 64 too, with scales in x's dtype,
    which are asked for a unit ahead.
    """
    FINE: gl.constexpr = is_fine(GROUP)
    WIDE: gl.constexpr = 1 if ACT is None else 2
    BK: gl.constexpr = 64 if PACKED else 128
    BYTES: gl.constexpr = (BN * WIDE * BK + BM * (256 if PACKED else 128)) * BLOCKS
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = x_desc.dtype
    REGISTERS: gl.constexpr = PACKED and BM <= 16
    mma: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
        if REGISTERS
        else gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16 if PACKED else 32])
    )
    # what an integer's bits stand for beside it
    ADDED: gl.constexpr = 128.0 if gl.bfloat16 == DTYPE else 1024.0
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    bytes_: gl.constexpr = bytes_layout(BN, WARPS)
    inputs: gl.constexpr = inputs_layout(BM if REGISTERS else 8, WARPS)
    # of groups: those of a block, and what belongs to one in a unit
    SCALES: gl.constexpr = 128 // GROUP if FINE else 1
    by_scales: gl.constexpr = scales_layout(BN, SCALES, WARPS)
    TENSORS: gl.constexpr = WIDE * (2 if ZERO else 1)

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = (K + 128 * BLOCKS - 1) // (128 * BLOCKS)
    units = (N + BN - 1) // BN * slices
    first = first_unit(program, units, programs)
    stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS * WIDE, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BLOCKS, BM, 128], x_desc.layout)
    bars = barriers(STAGES, 1)
    fence_async_shared()

    ask_tile = first // slices
    ask_slice = first % slices
    x_slice = ask_slice
    for place in gl.static_range(STAGES):
        live = first + place < stop
        load_weights(w_desc, bars, w_ring, place, ask_tile, N, ask_slice, live, BYTES, BN, BLOCKS, WIDE)
        ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
    if FINE:
        offsets = gl.arange(0, SCALES, gl.SliceLayout(0, gl.SliceLayout(2, by_scales)))
        own_rows = gl.arange(0, BN, gl.SliceLayout(1, gl.SliceLayout(2, by_scales)))
        ahead_tile = first // slices
        ahead_slice = first % slices
        rows = ahead_tile * BN + own_rows
        rows = gl.where(rows < N, rows, -1).to(gl.int64)
        ahead = unit_groups(
            scale_ptr, zero_ptr, rows, N.to(gl.int64), offsets, G, ahead_slice * BLOCKS, BLOCKS, SCALES, WIDE, ZERO
        )
    if PDL:
        gdc_wait()
    for place in gl.static_range(STAGES):
        _ask_inputs(x_desc, bars, x_ring, place, x_slice, first + place < stop, BLOCKS)
        x_slice = next_slice(x_slice, slices)

    if REGISTERS and not FINE:
        ones = gl.full((BN, 128), 1.0, DTYPE, left)
    at = cursor(first * 0)
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        acc = gl.zeros((BN, BM), gl.float32, mma)
        acc_up = acc
        n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, mma))
        m = gl.arange(0, BM, gl.SliceLayout(0, mma))
        cells = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, bytes_))
        scale_rows = n // ROWS
        up_rows = (n + N) // ROWS
        last_row = ((N * WIDE + ROWS - 1) // ROWS).to(gl.int32)
        for unit in range(begin, end):
            if FINE:
                groups = ahead
                ahead_tile, ahead_slice = next_unit(ahead_tile, ahead_slice, slices)
                following = ahead_tile * BN + own_rows
                following = gl.where((following < N) & (unit + 1 < stop), following, -1).to(gl.int64)
                ahead = unit_groups(
                    scale_ptr, zero_ptr, following, N.to(gl.int64), offsets, G, ahead_slice * BLOCKS, BLOCKS, SCALES,
                    WIDE, ZERO,
                )  # fmt: skip
            for block in gl.static_range(BLOCKS):
                number = (unit - tile * slices) * BLOCKS + block
                if FINE:
                    if block == 0:
                        mbarrier.wait(bars.index(at.stage), at.phase)
                    box = at.stage * BLOCKS + block
                    x = x_ring.index(box)
                    w = w_ring.index(box * WIDE).load(bytes_)
                    acc = _add_scaled(acc, w, x, groups, block * TENSORS, inputs, by_scales, ZERO, REGISTERS)
                    if WIDE == 2:
                        w = w_ring.index(box * WIDE + 1).load(bytes_)
                        acc_up = _add_scaled(
                            acc_up, w, x, groups, block * TENSORS + TENSORS // 2, inputs, by_scales, ZERO, REGISTERS
                        )
                else:
                    group = number * 128 // GROUP if GROUP > 0 else number * 0
                    scale = _scale_of(scale_ptr, scale_rows, last_row, G, group)
                    if WIDE == 2:
                        scale_up = _scale_of(scale_ptr, up_rows, last_row, G, group)
                    if REGISTERS:
                        zero = _taken_off(zero_ptr, n, N * WIDE, G, group, ADDED, ZERO)
                        zero_up = _taken_off(zero_ptr, n + N, N * WIDE, G, group, ADDED, ZERO) if WIDE == 2 else zero
                    elif ZERO:
                        zero = _zero_of(zero_ptr, cells, N * WIDE, G, group, DTYPE, bytes_)
                        if WIDE == 2:
                            zero_up = _zero_of(zero_ptr, cells + N, N * WIDE, G, group, DTYPE, bytes_)
                    else:
                        zero = cells
                        zero_up = cells
                    if not PACKED:
                        spot = xs_ptr + m.to(gl.int64) * xs_row + (number * xs_group if GROUPED else number * 0)
                        there = (m < M) & (number * 128 < K)
                        sx = gl.expand_dims(gl.load(spot, mask=there, other=0.0), 0)
                    if block == 0:
                        mbarrier.wait(bars.index(at.stage), at.phase)
                    box = at.stage * BLOCKS + block
                    none = gl.zeros((BN, BM), gl.float32, mma)
                    if REGISTERS:
                        x = inputs_of(x_ring.index(box).load(inputs), right)
                        total = mma_v2(ones, x, none)
                        w = integers_of(w_ring.index(box * WIDE).load(bytes_), DTYPE, left)
                        part = mma_v2(w, x, none) - total * zero
                        if WIDE == 2:
                            w = integers_of(w_ring.index(box * WIDE + 1).load(bytes_), DTYPE, left)
                            part_up = mma_v2(w, x, none) - total * zero_up
                    else:
                        x = x_ring.index(box).permute((1, 0))
                        if PACKED:
                            w = _integers(w_ring.index(box * WIDE).load(bytes_), zero, ZERO, DTYPE, left)
                        else:
                            w = w_ring.index(box * WIDE)
                        part = warpgroup_mma(w, x, none, use_acc=False)
                        if WIDE == 2:
                            if PACKED:
                                w = _integers(w_ring.index(box * WIDE + 1).load(bytes_), zero_up, ZERO, DTYPE, left)
                            else:
                                w = w_ring.index(box * WIDE + 1)
                            part_up = warpgroup_mma(w, x, none, use_acc=False)
                    if not PACKED:
                        part *= sx
                    acc += part * gl.expand_dims(scale, 1)
                    if WIDE == 2:
                        if not PACKED:
                            part_up *= sx
                        acc_up += part_up * gl.expand_dims(scale_up, 1)
            sync()
            more = unit + STAGES < stop
            load_weights(w_desc, bars, w_ring, at.stage, ask_tile, N, ask_slice, more, BYTES, BN, BLOCKS, WIDE)
            _ask_inputs(x_desc, bars, x_ring, at.stage, ask_slice, more, BLOCKS)
            ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
            at = at.next(STAGES)
        if FINE and gl.bfloat16 == DTYPE:
            acc *= LOWERED
            acc_up *= LOWERED
        close_tile(
            acc, acc_up, tile, begin, end, slices, units, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
            M, N, y_stride, residual_stride, SHARED, ACT, BIAS, RESIDUAL,
        )  # fmt: skip


@triton.jit
def order_kernel(x_ptr, order_ptr, out_ptr, K, x_stride, ORDER: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """A row's inputs, in the order that they stand in in an operand of `quantized_stream_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    # of 128: byte / 2, half, quarter, byte % 2
    source = (k & ~127) + ((k >> 1) & 3) * 32 + ((k >> 4) & 7) * 4 + (k & 1) * 2 + ((k >> 3) & 1)
    if ORDER:
        source = tl.load(order_ptr + source, mask=k < K, other=0)
    tl.store(out_ptr + row * K + k, tl.load(x_ptr + row * x_stride + source, mask=k < K, other=0.0), mask=k < K)


def order_inputs(workspace: Workspace, x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] for more than FEW_ROWS rows, its inputs in `order` first."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    workspace.launch(order_kernel, (len(x), cdiv(x.shape[1], 1024)))(
        x, order, out, x.shape[1], x.stride(0), ORDER=order is not None, BK=1024, PDL=workspace.pdl,
        num_warps=4, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return out


def streams_packed(x: torch.Tensor, weight: PackedInt) -> bool:
    """Whether `packed_stream` takes both, but for the number of rows: 16-bit rows, 4-bit integers, groups of 128 inputs
    or multiples of them, or of 32 or 64 with scales in x's dtype."""
    whole = weight.group % WIDTH == 0 or weight.group >= weight.inputs
    return (
        weight.bits == 4
        and weight.inputs % WIDTH == 0
        and (whole or (fine(weight) and weight.scale.dtype == x.dtype))
        and (weight.order is None or len(x) > FEW_ROWS)
        and group_products(x.device)
        and streams(x, weight.data)
    )


def streams_fp8(weight: Fp8) -> bool:
    """Whether `fp8_stream` takes the weight, and inputs that were quantized for it, of up to 64 rows: 8-bit
    floats, scales of the weight for 128 inputs or for all."""
    k = weight.data.shape[1]
    return (
        weight.inputs.number == "fp8"
        and weight.block[1] in (WIDTH, k)
        and weight.inputs.group in (0, WIDTH)
        and group_products(weight.data.device)
        and k % 16 == 0
        and weight.data.data_ptr() % 16 == 0
    )


def packed_stream(
    workspace: Workspace, x: torch.Tensor, weight: PackedInt, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, tile: StreamTile, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear` without a norm; counts: zeros, one for each tile of outputs, left zero."""
    if tile.rows > FEW_ROWS:
        x = order_inputs(workspace, x, weight.order)
    group = 0 if weight.group >= weight.inputs else weight.group
    held = (boxes(weight.data, tile.outputs, WIDTH // 2), weight.scale, weight.zero)
    shape = (weight.shape[0], weight.scale.shape[-1])
    constants = {"PACKED": True, "GROUP": group, "ROWS": 1, "ZERO": weight.zero is not None, "GROUPED": False}
    return _launch(workspace, x, None, held, shape, bias, residual, activation, tile, counts, x.dtype, constants)


def fp8_stream(
    workspace: Workspace, x: torch.Tensor, scales: torch.Tensor, weight: Fp8, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, tile: StreamTile, counts: torch.Tensor, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`linear` without a norm, of numbers x [T, K] and their scales [T, groups], in `dtype`."""
    group = 0 if weight.scale.shape[1] == 1 else weight.block[1]
    held = (boxes(weight.data, tile.outputs, WIDTH), weight.scale, None)
    shape = (weight.shape[0], weight.scale.shape[1])
    constants = {
        "PACKED": False, "GROUP": group, "ROWS": weight.block[0], "ZERO": False, "GROUPED": scales.shape[1] > 1,
    }  # fmt: skip
    return _launch(workspace, x, scales, held, shape, bias, residual, activation, tile, counts, dtype, constants)


def _launch(
    workspace: Workspace, x: torch.Tensor, scales: torch.Tensor | None, held: tuple[Any, ...], shape: tuple[int, int],
    bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str | None, tile: StreamTile,
    counts: torch.Tensor, dtype: torch.dtype, constants: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """held: the weight's descriptor, scales and zero points; shape: its rows, and scales of a row."""
    m, k = x.shape
    wide = 2 if activation else 1
    n = shape[0] // wide
    most = tile.programs * multiprocessors(x.device)
    work = work_of(x, n, tile.rows, tile.outputs, tile.inputs, wide, tile.split, most, dtype)
    workspace.launch(quantized_stream_kernel, (work.programs,))(
        boxes(x, tile.rows, WIDTH), scales, *held, bias, residual, work.y, work.partials, counts,
        m, n, k, shape[1], 0 if scales is None else scales.stride(0), 0 if scales is None else scales.stride(1),
        work.y.stride(0), residual.stride(0) if residual is not None else 0,
        BM=tile.rows, BN=tile.outputs, BLOCKS=tile.inputs // WIDTH, STAGES=tile.stages, SHARED=work.shared,
        ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl,
        **constants, num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
