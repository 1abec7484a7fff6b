# mypy: disable-error-code="no-untyped-def,attr-defined,assignment,misc"
"""Products of one row with a narrow weight of packed 4-bit integers or 8-bit floats, in Gluon: as fast as the weight
can be read.

A program gives 16 outputs and shares nothing with another: its warps take every W-th block of 128 inputs, and their
sums meet at the end. Nothing loops: weights go from memory into registers, in the order in which they are an operand
of the matrix instructions (`quantized_operand`), as many blocks ahead as registers hold, and the first are asked for
before the kernel before has finished (PDL). Each block has sums of its own, which are scaled and added up in float32.
What stands in an integer's place is 128 or 1024 more; that and the zero point are taken off a block's sums by the sum
of its inputs, which a product with ones gives.

The row stands in shared memory, where it comes normed, or normed and quantized (`quantized_row`): no launch before the
product is needed. All columns of a matrix instruction hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import fp8_conversions, register_products
from kernels.hopper.compat import view
from kernels.linear.packed_groups import fine, is_fine, quarter_sums
from kernels.linear.quantized_operand import KINDS, floats, integers, pairs
from kernels.linear.quantized_row import stage_quantized_row, stage_row
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Fp8, PackedInt
from kernels.workspace import Workspace

# Inputs of a block, outputs of a program.
WIDTH, OUTPUTS = 128, 16
# The most inputs: of a row in shared memory, and of code without a loop.
MAX_INPUTS = 16384


@gluon.jit
def _scales(scale_rows, zero_rows, block, offsets, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """Scales and zero points [W, 16] of each warp's block, or [W, 16, 4] of its quarters, whose groups stand at
    `offsets` from its first."""
    if is_fine(GROUP):
        group = block * (128 // GROUP) + offsets
    else:
        group = block * 128 // GROUP if GROUP > 0 else block * 0
    scale = gl.load(scale_rows + group)
    return scale, gl.load(zero_rows + group) if ZERO else scale


@gluon.jit
def _by_column(each, FINE: gl.constexpr):
    """What `_scales` gives, in float32, for sums [W, 16, 8], or [W, 16, 4] of quarters."""
    wide = each.to(gl.float32)
    return wide if FINE else gl.expand_dims(wide, 2)


@gluon.jit
def quantized_vector_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr,
    N, K, G, w_stride, eps, offset,
    AHEAD: gl.constexpr, ROUNDS: gl.constexpr, ROW_WORDS: gl.constexpr,
    DTYPE: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, ZERO: gl.constexpr,
    STATIC: gl.constexpr, POWER: gl.constexpr, GROUPED: gl.constexpr, NORM: gl.constexpr, OFFSET: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program i gives outputs from 16 · i on. x, its norm's weight and the weight are read as words of 32 bits; x is
    16-bit floats of DTYPE, which NORM norms.

    AHEAD: blocks of a warp that are on their way. ROUNDS: blocks of a warp. ROW_WORDS: a power of two that all rounds
    of all warps fit in, as words of the row in shared memory.

    PACKED: the weight is 4-bit integers, ZERO: with zero points. Else it is 8-bit floats, and x becomes such, with a
    scale for 128 inputs (GROUPED) or one: x_scale_ptr's (STATIC), or its own, as a power of two (POWER). GROUP: inputs
    that share a scale of the weight, a multiple of 128, or 64 or 32 of integers; 0: all. ROWS: outputs that share it.

    In groups of 64 or 32, each of the matrix instructions' columns holds a quarter of a block of the row alone. So
    quarters have sums of their own.
    """
    FINE: gl.constexpr = is_fine(GROUP)
    W: gl.constexpr = gl.num_warps()
    # words of a row of a block: of the weight, of x
    WORDS: gl.constexpr = 16 if PACKED else 32
    X_WORDS: gl.constexpr = 64 if PACKED else 32
    # what an integer's bits stand for beside it
    ADDED: gl.constexpr = 128.0 if gl.bfloat16 == DTYPE else 1024.0
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    of_blocks: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, mma))
    warps: gl.constexpr = [[1, 0, 0], [2, 0, 0], [4, 0, 0]][: 2 if W == 4 else 3]
    quarter: gl.constexpr = [[0, 0, 4], [0, 0, 8]]
    row_lanes: gl.constexpr = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    weights: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]] + ([] if PACKED else [[0, 0, 16]]) + [[0, 8, 0]],
        quarter + row_lanes, warps, [], [W, 16, WORDS],
    )  # fmt: skip
    inputs: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]] + ([[0, 0, 4], [0, 0, 8]] if PACKED else [[0, 0, 16]]),
        ([[0, 0, 16], [0, 0, 32]] if PACKED else quarter) + row_lanes, warps, [], [W, 8, X_WORDS],
    )  # fmt: skip
    # sums [W, 16, 8] of a row's quarters: a quarter has two equal columns
    quarters: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0]], [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]][: 2 if W == 4 else 3], [], [W, 16, 4, 2],
    )  # fmt: skip
    by_scale: gl.constexpr = gl.SliceLayout(3, quarters) if FINE else mma
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.program_id(0) * 16
    blocks = K // 128

    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, weights)))
    row = first + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, weights)))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, weights)))
    starts = gl.minimum(row, N - 1).to(gl.int64)[None, :] * w_stride + (warp * 0)[:, None]
    place = w_ptr + gl.expand_dims(starts, 2) + word[None, None, :]
    mine = gl.expand_dims(warp[:, None], 2)
    s_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, by_scale)))[:, None]
    s_row = first + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, by_scale)))
    s_row = gl.minimum(s_row, N - 1).to(gl.int64)[None, :]
    scale_rows = scale_ptr + s_row // ROWS * G
    zero_rows = zero_ptr + s_row * G if ZERO else scale_rows
    offsets = s_warp
    if FINE:
        offsets = (gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_scale))) * 32 // GROUP)[None, None, :]
        s_warp, scale_rows = gl.expand_dims(s_warp, 2), gl.expand_dims(scale_rows, 2)
        zero_rows = gl.expand_dims(zero_rows, 2)

    if PDL:
        gdc_launch_dependents()
    ws, scales, zeros = (), (), ()
    for turn in gl.static_range(AHEAD):
        # the last block in the place of those behind it
        ws = ws + (gl.load(place + gl.minimum(mine + turn * W, blocks - 1) * WORDS),)  # noqa: RUF005
        held = _scales(scale_rows, zero_rows, gl.minimum(s_warp + turn * W, blocks - 1), offsets, GROUP, ZERO)
        scales = scales + (held[0],)  # noqa: RUF005
        zeros = zeros + (held[1],)  # noqa: RUF005

    whole: gl.constexpr = gl.BlockedLayout([4], [32], [W], [0])
    # of x as it comes
    COMING: gl.constexpr = ROW_WORDS if PACKED else 2 * ROW_WORDS
    spot = gl.arange(0, COMING, whole)
    g = gl.load(norm_ptr + spot, mask=spot < K // 2, other=0) if NORM else spot
    if PDL:
        gdc_wait()
    given = gl.load(x_ptr + spot, mask=spot < K // 2, other=0)
    if PACKED:
        held_row = gl.allocate_shared_memory(gl.int32, [ROW_WORDS], plain)
        factor = stage_row(given, g, K, eps, offset, held_row, DTYPE, NORM, OFFSET)
    else:
        bytes_row = gl.allocate_shared_memory(gl.float8e4nv, [4 * ROW_WORDS], plain)
        held_row = view(bytes_row, gl.int32, [ROW_WORDS], plain)
        row_scales = gl.allocate_shared_memory(gl.float32, [ROW_WORDS // 32], plain)
        factor = stage_quantized_row(
            given, g, K, eps, offset, x_scale_ptr, bytes_row, row_scales, DTYPE, NORM, GROUPED, STATIC, POWER,
        )  # fmt: skip
        scale_rounds = view(row_scales, gl.float32, [ROW_WORDS // 32 // W, W], plain)
    tiled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_rounds = view(held_row, gl.int32, [ROW_WORDS // X_WORDS // W, W, X_WORDS], tiled)

    acc = gl.zeros((W, 16, 4), gl.float32, by_scale) if FINE else gl.zeros((W, 16, 8), gl.float32, mma)
    sums = gl.zeros((W, 16, 8), gl.float32, mma)
    if FINE:
        quarter_of = gl.arange(0, X_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, inputs))) // (X_WORDS // 4)
        column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, inputs)))
        own = (quarter_of[None, None, :] == (column >> 1)[None, :, None]).to(gl.int32)
        own += gl.zeros([W, 8, X_WORDS], gl.int32, inputs)
    ones = gl.full((W, 16, 128), 1.0, DTYPE if PACKED else gl.float16, left)
    for turn in gl.static_range(ROUNDS):
        block = turn * W
        now = gl.expand_dims(x_rounds.index(turn).load(gl.SliceLayout(1, inputs)), 1)
        now += gl.zeros([W, 8, X_WORDS], gl.int32, inputs)
        if FINE:
            # a thread's words are of one quarter
            now = gl.inline_asm_elementwise("mul.lo.s32 $0, $1, $2;", "=r,r,r", [now, own], gl.int32, True, 1)
        operand = gl.permute(pairs(now, DTYPE) if PACKED else floats(now), (0, 2, 1))
        operand = gl.convert_layout(operand, right, assert_trivial=True)
        if PACKED:
            w = integers(ws[turn % AHEAD], DTYPE, left)
        else:
            w = gl.convert_layout(floats(ws[turn % AHEAD]), left, assert_trivial=True)
        scale = _by_column(scales[turn % AHEAD], FINE)
        middle = _by_column(zeros[turn % AHEAD], FINE) if ZERO else 8.0
        if turn + AHEAD < ROUNDS:
            beyond = block + AHEAD * W
            new = gl.load(place + gl.minimum(mine + beyond, blocks - 1) * WORDS)
            ws = ws[: turn % AHEAD] + (new,) + ws[turn % AHEAD + 1 :]  # noqa: RUF005
            if GROUP > 0:
                held = _scales(scale_rows, zero_rows, gl.minimum(s_warp + beyond, blocks - 1), offsets, GROUP, ZERO)
                scales = scales[: turn % AHEAD] + (held[0],) + scales[turn % AHEAD + 1 :]  # noqa: RUF005
                zeros = zeros[: turn % AHEAD] + (held[1],) + zeros[turn % AHEAD + 1 :]  # noqa: RUF005
        if GROUP > 0 or GROUPED:
            part = mma_v2(w, operand, gl.zeros((W, 16, 8), gl.float32, mma))
            if PACKED:
                total = mma_v2(ones, operand, gl.zeros((W, 16, 8), gl.float32, mma))
                if FINE:
                    part, total = quarter_sums(part, quarters), quarter_sums(total, quarters)
                part -= (middle + ADDED) * total
            if GROUPED:
                sx = gl.expand_dims(scale_rounds.index(turn).load(of_blocks), 1)
                sx += gl.zeros([W, 8], gl.float32, gl.SliceLayout(1, mma))
                part *= gl.expand_dims(sx, 1)
            acc += part * scale if GROUP > 0 else part
        else:
            acc = mma_v2(w, operand, acc)
            if PACKED:
                sums = mma_v2(ones, operand, sums)
    if GROUP == 0:
        if PACKED:
            middle = gl.expand_dims(zeros[0].to(gl.float32), 2) if ZERO else 8.0
            acc -= (middle + ADDED) * sums
        acc *= gl.expand_dims(scales[0].to(gl.float32), 2)

    cells: gl.constexpr = gl.SliceLayout(0, mma)
    if FINE:
        whole_sums = gl.convert_layout(gl.sum(gl.sum(acc, axis=2), axis=0), gl.SliceLayout(1, cells))
        y = gl.expand_dims(whole_sums, 1) * factor + gl.zeros((16, 8), gl.float32, cells)
    else:
        y = gl.sum(acc, axis=0) * factor
    n = (first + gl.arange(0, 16, gl.SliceLayout(1, cells)))[:, None]
    stored = (n < N) & (gl.arange(0, 8, gl.SliceLayout(0, cells)) == 0)[None, :]
    if BIAS:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    n += gl.zeros([16, 8], gl.int32, cells)
    if RESIDUAL:
        y += gl.load(residual_ptr + n, mask=stored, other=0.0).to(gl.float32)
    gl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class QuantizedVectorTile:
    """How `quantized_vector_kernel` is cut: warps (4 or 8) that share a program's inputs, and blocks of a warp that are
    on their way."""

    warps: int
    ahead: int


def reads_packed(x: torch.Tensor, weight: PackedInt) -> bool:
    """Whether `packed_vector` takes both: a 16-bit row, 4-bit integers in groups of whole blocks, 64 or 32, inputs in
    order."""
    return (
        _readable(x, weight.data)
        and weight.bits == 4
        and weight.order is None
        and (weight.group % WIDTH == 0 or weight.group >= weight.inputs or fine(weight))
    )


def reads_fp8(x: torch.Tensor, weight: Fp8) -> bool:
    """Whether `fp8_vector` takes both: a 16-bit row that is quantized to 8-bit floats, scales of the weight for 128
    inputs or for all, on a GPU that converts such floats."""
    return (
        _readable(x, weight.data)
        and weight.inputs.number == "fp8"
        and weight.inputs.group in (0, WIDTH)
        and weight.inputs.largest is None
        and weight.block[1] in (WIDTH, weight.data.shape[1])
        and fp8_conversions(x.device)
    )


def _readable(x: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a row of whole blocks and a weight stand on 16 bytes, on a GPU whose warps multiply from registers."""
    return (
        len(x) == 1
        and x.dtype in KINDS
        and x.shape[1] % WIDTH == 0
        and x.shape[1] <= MAX_INPUTS
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and data.data_ptr() % 16 == 0
        and data.stride(0) * data.itemsize % 16 == 0
        and register_products(x.device)
    )


def packed_vector(
    workspace: Workspace, x: torch.Tensor, weight: PackedInt, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float, offset: float, residual: torch.Tensor | None,
    tile: QuantizedVectorTile,
) -> torch.Tensor:  # fmt: skip
    """`linear` of one row."""
    constants = {
        "PACKED": True, "ROWS": 1, "ZERO": weight.zero is not None, "GROUPED": False, "STATIC": False, "POWER": False,
        "GROUP": 0 if weight.group >= weight.inputs else weight.group,
    }  # fmt: skip
    held, normed = (weight.data, weight.scale, weight.zero, None), (norm_weight, eps, offset)
    return _launch(workspace, x, held, normed, bias, residual, tile, constants)


def fp8_vector(
    workspace: Workspace, x: torch.Tensor, weight: Fp8, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float, offset: float, residual: torch.Tensor | None,
    tile: QuantizedVectorTile,
) -> torch.Tensor:  # fmt: skip
    """`linear` of one row."""
    rule = weight.inputs
    constants = {
        "PACKED": False, "ROWS": weight.block[0], "ZERO": False, "GROUPED": rule.group > 0,
        "STATIC": rule.scale is not None, "POWER": rule.power_of_two,
        "GROUP": 0 if weight.scale.shape[1] == 1 else weight.block[1],
    }  # fmt: skip
    held, normed = (weight.data, weight.scale, None, rule.scale), (norm_weight, eps, offset)
    return _launch(workspace, x, held, normed, bias, residual, tile, constants)


def _launch(
    workspace: Workspace, x: torch.Tensor, held: tuple[Any, ...], normed: tuple[torch.Tensor | None, float, float],
    bias: torch.Tensor | None, residual: torch.Tensor | None, tile: QuantizedVectorTile, constants: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """held: the weight's numbers, scales and zero points, and the scale of x that is given; normed: the norm's weight,
    eps and offset."""
    (data, scale, zero, x_scale), (norm_weight, eps, offset) = held, normed
    n, k = data.shape[0], x.shape[1]
    y = torch.empty((1, n), dtype=x.dtype, device=x.device)
    rounds = cdiv(k // WIDTH, tile.warps)
    words = torch.int32
    workspace.launch(quantized_vector_kernel, (cdiv(n, OUTPUTS),))(
        x.view(words), x_scale, data.view(words), scale, zero, bias,
        None if norm_weight is None else norm_weight.view(words), residual, y,
        n, k, scale.shape[1], data.stride(0) * data.itemsize // 4, eps, offset,
        AHEAD=min(tile.ahead, rounds), ROUNDS=rounds,
        ROW_WORDS=next_power_of_2(rounds) * tile.warps * (WIDTH // 2 if constants["PACKED"] else WIDTH // 4),
        DTYPE=KINDS[x.dtype], NORM=norm_weight is not None, OFFSET=offset != 0.0, BIAS=bias is not None,
        RESIDUAL=residual is not None, PDL=workspace.pdl, **constants, num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return y
