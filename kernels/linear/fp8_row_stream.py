# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Products of one row with a large weight of 8-bit floats on Hopper, in Gluon: the row is normed and quantized inside.

Weights stream through shared memory, and work is cut, as in `quantized_row_stream`. The matrix unit reads them from
there: nothing is unpacked. Each program puts the blocks of 128 inputs that its weights meet into shared memory once,
as 8-bit floats. Eight blocks stand there as eight columns of an operand, so that they take no more room than the row
has. Of a block's product one column is its own, and the block's scale clears the others.
"""

from __future__ import annotations

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

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import sync, view
from kernels.hopper.epilogue import close_tile
from kernels.hopper.ring import barriers, cursor, load_weights
from kernels.hopper.schedule import first_unit, next_slice, next_unit, work_of
from kernels.linear.quantized_row import COLUMNS, PIECE, piece_of, scale_of, stage_blocks
from kernels.linear.quantized_row_stream import WIDTH, RowStreamTile
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Fp8
from kernels.workspace import Workspace

# The most inputs.
MAX_INPUTS = 16384


@gluon.jit
def _normed(x, g, inverse, offset, DTYPE: gl.constexpr):
    """Inputs as the product sees them before they are rounded to 8 bits."""
    return (x.to(gl.float32) * inverse * (g.to(gl.float32) + offset)).to(DTYPE).to(gl.float32)


@gluon.jit
def _inverse_root(x_ptr, K, eps, PIECES: gl.constexpr, WHOLE: gl.constexpr):
    """What a row is multiplied by to have a root mean square of one."""
    squares = gl.zeros([PIECE], gl.float32, WHOLE)
    for some in gl.static_range(PIECES):
        wide = piece_of(x_ptr, some, K, WHOLE).to(gl.float32)
        squares += wide * wide
    return gl.rsqrt(gl.sum(squares, axis=0) / K + eps)


@gluon.jit
def _box_scales(
    scale_ptr, first, stop, slices, N, G,
    BN: gl.constexpr, BLOCKS: gl.constexpr, WIDE: gl.constexpr, BOXES: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Scales of the boxes of weights of units first to stop, [BOXES], as `load_weights` brings them. What lies behind
    the inputs has the scale of the last group."""
    box = gl.arange(0, BOXES, WHOLE)
    unit = first + box // (BLOCKS * WIDE)
    group = gl.minimum(unit % slices * BLOCKS + box // WIDE % BLOCKS, G - 1)
    row = (unit // slices * BN + box % WIDE * N) // 128
    return gl.load(scale_ptr + row.to(gl.int64) * G + group, mask=unit < stop, other=0.0)


@gluon.jit
def fp8_row_stream_kernel(
    x_ptr, norm_ptr, w_desc, scale_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    N, K, G, eps, offset, limit,
    BN: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, BOXES: gl.constexpr,
    PIECES: gl.constexpr, POWER: gl.constexpr, NORM: gl.constexpr, SHARED: gl.constexpr, ACT: gl.constexpr,
    LIMITED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See `kernels.linear.stream.stream_kernel`. A unit is BLOCKS times 128 inputs.

    HELD: a power of two that the blocks of a program's units fit in, or all blocks of the row. BOXES: one that the
    boxes of weights of its units fit in. PIECES: those of the row. The weight has a scale for 128 inputs of 128
    outputs, a multiple of BN, and x one for 128 inputs. POWER: x's are powers of two. LIMITED: the
    activation has a limit.
    """
    WIDE: gl.constexpr = 1 if ACT is None else 2
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    BYTES: gl.constexpr = BN * WIDE * 128 * BLOCKS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 32])
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    coming: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    whole: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    single: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rows_of_8: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 128], gl.float8e4nv)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = (K + 128 * BLOCKS - 1) // (128 * BLOCKS)
    units = (N + BN - 1) // BN * slices
    first = first_unit(program, units, programs)
    stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS * WIDE, BN, 128], w_desc.layout)
    bars = barriers(STAGES, 1)
    x_boxes = gl.allocate_shared_memory(gl.float8e4nv, [HELD // COLUMNS, COLUMNS, 128], rows_of_8)
    x_scales = gl.allocate_shared_memory(gl.float32, [HELD, COLUMNS], flat)
    fence_async_shared()
    ask_tile = first // slices
    ask_slice = first % slices
    for stage in gl.static_range(STAGES):
        load_weights(w_desc, bars, w_ring, stage, ask_tile, N, ask_slice, first + stage < stop, BYTES, BN, BLOCKS, WIDE)
        ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
    w_scales = gl.allocate_shared_memory(gl.float32, [BOXES, 1], flat)
    by_box = _box_scales(scale_ptr, first, stop, slices, N, G, BN, BLOCKS, WIDE, BOXES, single)
    view(w_scales, gl.float32, [BOXES], flat).store(by_box)

    # places of shared memory that blocks of the row stand in, the first unit's in the first
    place = gl.arange(0, HELD, gl.SliceLayout(1, coming))
    at_slice = (first % slices + place // BLOCKS) % slices
    spot = (at_slice * BLOCKS + place % BLOCKS)[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, coming))[None, :]
    live = (place < gl.minimum(stop - first, slices) * BLOCKS)[:, None] & (spot < K)
    g = spot
    if NORM:
        g = gl.load(norm_ptr + spot, mask=live, other=0.0)
    if PDL:
        gdc_wait()
    x = gl.load(x_ptr + spot, mask=live, other=0.0)
    f = x.to(gl.float32)
    if NORM:
        f = _normed(x, g, _inverse_root(x_ptr, K, eps, PIECES, whole), offset, DTYPE)
    own = scale_of(gl.max(gl.abs(f), axis=1), POWER)
    stage_blocks(f, own, x_boxes, x_scales)
    fence_async_shared()
    sync()

    at = cursor(first * 0)
    turn = first * 0
    none = gl.zeros((BN, COLUMNS), gl.float32, mma)
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        acc = gl.zeros((BN, COLUMNS), gl.float32, mma)
        acc_up = acc
        for unit in range(begin, end):
            scales = ()
            for box in gl.static_range(BLOCKS * WIDE):
                one = x_scales.index(turn * BLOCKS + box // WIDE).load(columns)
                one *= w_scales.index((unit - first) * BLOCKS * WIDE + box).load(columns)
                scales = scales + (one[None, :],)  # noqa: RUF005
            mbarrier.wait(bars.index(at.stage), at.phase)
            sums = ()
            for box in gl.static_range(BLOCKS * WIDE):
                x_box = x_boxes.index((turn * BLOCKS + box // WIDE) // COLUMNS).permute((1, 0))
                w_box = w_ring.index(at.stage * BLOCKS * WIDE + box)
                sums = sums + (warpgroup_mma(w_box, x_box, none, use_acc=False, is_async=True),)  # noqa: RUF005
            if BLOCKS * WIDE == 1:
                sums = (warpgroup_mma_wait(0, deps=sums),)
            else:
                sums = warpgroup_mma_wait(0, deps=sums)
            sync()
            more = unit + STAGES < stop
            load_weights(w_desc, bars, w_ring, at.stage, ask_tile, N, ask_slice, more, BYTES, BN, BLOCKS, WIDE)
            ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
            at = at.next(STAGES)
            turn = next_slice(turn, slices)
            for block in gl.static_range(BLOCKS):
                acc += sums[block * WIDE] * scales[block * WIDE]
                if WIDE == 2:
                    acc_up += sums[block * WIDE + 1] * scales[block * WIDE + 1]
        close_tile(
            gl.expand_dims(gl.sum(acc, axis=1), 1), gl.expand_dims(gl.sum(acc_up, axis=1), 1),
            tile, begin, end, slices, units, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr, 1, N, N, N,
            SHARED, ACT, BIAS, RESIDUAL, limit, LIMITED,
        )  # fmt: skip


def row_streams_fp8(x: torch.Tensor, weight: Fp8, gated: bool) -> bool:
    """Whether `fp8_row_stream` takes both, but for the size: a 16-bit row on 16 bytes, quantized to 8-bit floats in
    groups of 128, and a weight with scales for 128 by 128."""
    n, k = weight.data.shape
    return (
        len(x) == 1
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and weight.data.data_ptr() % 16 == 0
        and k % 16 == 0
        and weight.block == (WIDTH, WIDTH)
        and not (gated and n % (2 * WIDTH))
        and weight.inputs.number == "fp8"
        and weight.inputs.group == WIDTH
        and weight.inputs.scale is None
        and weight.inputs.largest is None
        and group_products(x.device)
    )


def fp8_row_stream(
    workspace: Workspace, x: torch.Tensor, weight: Fp8, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float, offset: float, residual: torch.Tensor | None,
    activation: str | None, tile: RowStreamTile, counts: torch.Tensor, limit: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """`linear` of one row that `row_streams_fp8` takes; counts: zeros, one for each tile of outputs, left zero. limit:
    of the activation, as in `gated_activation`."""
    rows, k = weight.data.shape
    wide = 2 if activation else 1
    n = rows // wide
    most = tile.programs * multiprocessors(x.device)
    work = work_of(x, n, 1, tile.outputs, tile.inputs, wide, 0, most)
    blocks, slices = tile.inputs // WIDTH, cdiv(k, tile.inputs)
    units = cdiv(cdiv(n, tile.outputs) * slices, work.programs)
    workspace.launch(fp8_row_stream_kernel, (work.programs,))(
        x, norm_weight, boxes(weight.data, tile.outputs, WIDTH), weight.scale, bias, residual,
        work.y, work.partials, counts,
        n, k, weight.scale.shape[1], eps, offset, 0.0 if limit is None else limit,
        BN=tile.outputs, BLOCKS=blocks, STAGES=tile.stages,
        HELD=next_power_of_2(max(min(units, slices) * blocks, COLUMNS.value)),
        BOXES=next_power_of_2(units * blocks * wide), PIECES=cdiv(k, PIECE.value),
        POWER=weight.inputs.power_of_two, NORM=norm_weight is not None, SHARED=work.shared, ACT=activation,
        LIMITED=limit is not None, BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl,
        num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
