# mypy: disable-error-code="no-untyped-def,attr-defined,assignment,misc"
"""Products of up to 8 rows with a narrow weight of packed 4-bit integers or 8-bit floats, in Gluon: as fast as the
weight can be read.

A program gives 16 outputs and shares nothing with another: its warps take every W-th block of 128 inputs, and their
sums meet at the end. Nothing loops: weights go from memory into registers, in the order in which they are an operand
of the matrix instructions (`quantized_operand`), as many blocks ahead as registers hold, and the first are asked for
before the kernel before has finished (PDL). Each block has sums of its own, which are scaled and added up in float32.
What stands in an integer's place is 128 or 1024 more; that and the zero point are taken off a block's sums by the sum
of its inputs, which a product with ones gives.

One row stands in shared memory, where it comes normed or quantized (`quantized_row`). More rows are read by each warp.
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
from kernels.hopper import view
from kernels.linear.quantized_operand import floats, integers, pairs
from kernels.linear.quantized_row import stage_quantized_row, stage_row
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Fp8, PackedInt
from kernels.weight.inputs import FP8_MAX, SMALLEST
from kernels.workspace import Workspace

# Inputs of a block, outputs of a program.
WIDTH, OUTPUTS = 128, 16
# The most inputs: of a row in shared memory, and of code without a loop.
MOST_INPUTS = 16384
_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _scales(scale_rows, zero_rows, block, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """Scales and zero points [W, 16] of each warp's block."""
    group = block * 128 // GROUP if GROUP > 0 else block * 0
    scale = gl.load(scale_rows + group)
    return scale, gl.load(zero_rows + group) if ZERO else scale


@gluon.jit
def _rows_of(x_place, at, ahead, x_words, EVEN: gl.constexpr):
    """Words of the rows' inputs, `ahead` of a warp's first; zero behind the last, or with EVEN any."""
    spot = at + ahead
    if EVEN:
        x = gl.load(x_place + gl.where(spot < x_words, spot, at))
    else:
        x = gl.load(x_place + spot, mask=spot < x_words, other=0)
    return x


@gluon.jit(do_not_specialize=["M", "xs_row", "xs_group"])
def quantized_skinny_kernel(
    x_ptr, xs_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr,
    M, N, K, G, w_stride, x_stride, xs_row, xs_group, y_stride, residual_stride, eps, offset,
    AHEAD: gl.constexpr, ROUNDS: gl.constexpr, EVEN: gl.constexpr, ROW_WORDS: gl.constexpr,
    DTYPE: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, ZERO: gl.constexpr,
    GROUPED: gl.constexpr, QUANTIZE: gl.constexpr, NORM: gl.constexpr, OFFSET: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program i gives outputs from 16 · i on, of up to 8 rows. x, its norm's weight and the weight are read as words of
    32 bits.

    AHEAD: blocks of a warp that are on their way. ROUNDS: blocks of a warp; EVEN: all warps have so many.

    PACKED: the weight is 4-bit integers, ZERO: with zero points, and x 16-bit floats, of DTYPE; else it is 8-bit
    floats, and x too, with a scale for 128 inputs of a row (GROUPED), or one a row. GROUP: inputs that share a scale of
    the weight, a multiple of 128; 0: all. ROWS: outputs that share it.

    ROW_WORDS: for one row, a power of two that all rounds of all warps fit in; 0 for more rows. With QUANTIZE that row
    is 16-bit floats of DTYPE: (static scale, power of two, smallest magnitude, largest number). NORM: it is normed.
    """
    W: gl.constexpr = gl.num_warps()
    ONE: gl.constexpr = ROW_WORDS > 0
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
    eight: gl.constexpr = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    weights: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]] + ([] if PACKED else [[0, 0, 16]]) + [[0, 8, 0]],
        quarter + eight, warps, [], [W, 16, WORDS],
    )  # fmt: skip
    inputs: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]] + ([[0, 0, 4], [0, 0, 8]] if PACKED else [[0, 0, 16]]),
        ([[0, 0, 16], [0, 0, 32]] if PACKED else quarter) + eight, warps, [], [W, 8, X_WORDS],
    )  # fmt: skip
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.program_id(0) * 16
    blocks = K // 128
    x_words = blocks * X_WORDS

    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, weights)))
    row = first + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, weights)))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, weights)))
    lines = gl.minimum(row, N - 1).to(gl.int64)[None, :] * w_stride + (warp * 0)[:, None]
    place = w_ptr + gl.expand_dims(lines, 2) + word[None, None, :]
    mine = gl.expand_dims(warp[:, None], 2)
    s_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    s_row = first + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    s_row = gl.minimum(s_row, N - 1).to(gl.int64)[None, :]
    scale_rows = scale_ptr + s_row // ROWS * G
    zero_rows = zero_ptr + s_row * G if ZERO else scale_rows

    if PDL:
        gdc_launch_dependents()
    ws, scales, zeros = (), (), ()
    for turn in gl.static_range(AHEAD):
        # the last block in the place of those behind it
        ws = ws + (gl.load(place + gl.minimum(mine + turn * W, blocks - 1) * WORDS),)  # noqa: RUF005
        held = _scales(scale_rows, zero_rows, gl.minimum(s_warp + turn * W, blocks - 1), GROUP, ZERO)
        scales = scales + (held[0],)  # noqa: RUF005
        zeros = zeros + (held[1],)  # noqa: RUF005

    factor = 1.0
    if ONE:
        whole: gl.constexpr = gl.BlockedLayout([4], [32], [W], [0])
        # words of x as it comes
        COMING: gl.constexpr = ROW_WORDS if QUANTIZE is None else 2 * ROW_WORDS
        spot = gl.arange(0, COMING, whole)
        coming = K // 2 if PACKED or QUANTIZE is not None else K // 4
        g = gl.load(norm_ptr + spot, mask=spot < coming, other=0) if NORM else spot
        if PDL:
            gdc_wait()
        given = gl.load(x_ptr + spot, mask=spot < coming, other=0)
        if QUANTIZE is None:
            held_row = gl.allocate_shared_memory(gl.int32, [ROW_WORDS], plain)
            factor = stage_row(given, g, K, eps, offset, held_row, DTYPE, NORM, OFFSET)
        else:
            bytes_row = gl.allocate_shared_memory(gl.float8e4nv, [4 * ROW_WORDS], plain)
            held_row = view(bytes_row, gl.int32, [ROW_WORDS], plain)
            row_scales = gl.allocate_shared_memory(gl.float32, [ROW_WORDS // 32], plain)
            factor = stage_quantized_row(
                given, g, K, eps, offset, xs_ptr, bytes_row, row_scales, DTYPE, NORM, GROUPED,
                QUANTIZE[0], QUANTIZE[1], QUANTIZE[2], QUANTIZE[3],
            )  # fmt: skip
            sx_rounds = view(row_scales, gl.float32, [ROW_WORDS // 32 // W, W], plain)
        tiled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        x_rounds = view(held_row, gl.int32, [ROW_WORDS // X_WORDS // W, W, X_WORDS], tiled)
    else:
        if PDL:
            gdc_wait()
        x_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, inputs)))
        m = gl.minimum(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, inputs))), M - 1)
        k = gl.arange(0, X_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, inputs)))
        at = gl.expand_dims((x_warp * X_WORDS)[:, None], 2) + k[None, None, :]
        x_place = x_ptr + gl.expand_dims(m[None, :], 2).to(gl.int64) * x_stride
        x = _rows_of(x_place, at, 0, x_words, EVEN)
    if GROUPED and not ONE:
        c = gl.minimum(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, mma))), M - 1)
        c_warp = gl.arange(0, W, of_blocks)[:, None]
        sx_rows = xs_ptr + c.to(gl.int64)[None, :] * xs_row

    acc = gl.zeros((W, 16, 8), gl.float32, mma)
    sums = gl.zeros((W, 16, 8), gl.float32, mma)
    ones = gl.full((W, 16, 128), 1.0, DTYPE if PACKED else gl.float16, left)
    for turn in gl.static_range(ROUNDS):
        block = turn * W
        if ONE:
            now = gl.expand_dims(x_rounds.index(turn).load(gl.SliceLayout(1, inputs)), 1)
            now += gl.zeros([W, 8, X_WORDS], gl.int32, inputs)
        else:
            now = x
            # the next block's inputs are on their way while this one is multiplied
            x = _rows_of(x_place, at, (block + W) * X_WORDS, x_words, EVEN)
        operand = gl.permute(pairs(now, DTYPE) if PACKED else floats(now), (0, 2, 1))
        operand = gl.convert_layout(operand, right, assert_trivial=True)
        if PACKED:
            w = integers(ws[turn % AHEAD], DTYPE, left)
        else:
            w = gl.convert_layout(floats(ws[turn % AHEAD]), left, assert_trivial=True)
        scale = gl.expand_dims(scales[turn % AHEAD].to(gl.float32), 2)
        middle = gl.expand_dims(zeros[turn % AHEAD].to(gl.float32), 2) if ZERO else 8.0
        if turn + AHEAD < ROUNDS:
            beyond = block + AHEAD * W
            new = gl.load(place + gl.minimum(mine + beyond, blocks - 1) * WORDS)
            ws = ws[: turn % AHEAD] + (new,) + ws[turn % AHEAD + 1 :]  # noqa: RUF005
            if GROUP > 0:
                held = _scales(scale_rows, zero_rows, gl.minimum(s_warp + beyond, blocks - 1), GROUP, ZERO)
                scales = scales[: turn % AHEAD] + (held[0],) + scales[turn % AHEAD + 1 :]  # noqa: RUF005
                zeros = zeros[: turn % AHEAD] + (held[1],) + zeros[turn % AHEAD + 1 :]  # noqa: RUF005
        if GROUP > 0 or GROUPED:
            part = mma_v2(w, operand, gl.zeros((W, 16, 8), gl.float32, mma))
            if PACKED:
                total = mma_v2(ones, operand, gl.zeros((W, 16, 8), gl.float32, mma))
                part -= (middle + ADDED) * total
            if GROUPED:
                if ONE:
                    sx = gl.expand_dims(sx_rounds.index(turn).load(of_blocks), 1)
                    sx += gl.zeros([W, 8], gl.float32, gl.SliceLayout(1, mma))
                else:
                    sx = gl.load(sx_rows + gl.minimum(block + c_warp, blocks - 1).to(gl.int64) * xs_group)
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

    y = gl.sum(acc, axis=0)
    cells: gl.constexpr = y.type.layout
    n = (first + gl.arange(0, 16, gl.SliceLayout(1, cells)))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, cells))[None, :]
    stored = (n < N) & (row < M)
    if ONE:
        y *= factor
    elif not PACKED and not GROUPED:
        y *= gl.load(xs_ptr + row.to(gl.int64) * xs_row, mask=row < M, other=0.0)
    if BIAS:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    if RESIDUAL:
        y += gl.load(residual_ptr + row.to(gl.int64) * residual_stride + n, mask=stored, other=0.0).to(gl.float32)
    gl.store(y_ptr + row.to(gl.int64) * y_stride + n, y.to(y_ptr.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class QuantizedSkinnyTile:
    """How `quantized_skinny_kernel` is cut: warps (4 or 8) that share a program's inputs, and blocks of a warp that are
    on their way."""

    warps: int
    ahead: int


def reads_packed(x: torch.Tensor, weight: PackedInt) -> bool:
    """Whether `packed_skinny` takes both, but for the number of rows: 16-bit rows, 4-bit integers, groups of whole
    blocks, inputs in their order."""
    return (
        weight.bits == 4
        and weight.order is None
        and x.dtype in _KINDS
        and weight.inputs % WIDTH == 0
        and weight.inputs <= MOST_INPUTS
        and (weight.group % WIDTH == 0 or weight.group >= weight.inputs)
        and register_products(x.device)
        and _aligned(x)
        and _aligned(weight.data)
    )


def reads_fp8(x: torch.Tensor, weight: Fp8) -> bool:
    """Whether `fp8_skinny` takes the weight and x, but for the number of rows: 16-bit rows that are quantized to 8-bit
    floats, scales of the weight for 128 inputs or for all, on a GPU that converts such floats."""
    k = weight.data.shape[1]
    return (
        weight.inputs.number == "fp8"
        and weight.inputs.group in (0, WIDTH)
        and weight.block[1] in (WIDTH, k)
        and x.dtype in _KINDS
        and k % WIDTH == 0
        and k <= MOST_INPUTS
        and register_products(x.device)
        and fp8_conversions(x.device)
        and _aligned(x)
        and _aligned(weight.data)
    )


def _aligned(x: torch.Tensor) -> bool:
    """Whether rows stand on 16 bytes."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0


def packed_skinny(
    workspace: Workspace, x: torch.Tensor, weight: PackedInt, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float, offset: float, residual: torch.Tensor | None,
    tile: QuantizedSkinnyTile,
) -> torch.Tensor:  # fmt: skip
    """`linear` of up to 8 rows, with a norm of one row alone."""
    constants = {
        "PACKED": True, "ROWS": 1, "ZERO": weight.zero is not None, "GROUPED": False, "QUANTIZE": None,
        "GROUP": 0 if weight.group >= weight.inputs else weight.group,
    }  # fmt: skip
    held, normed = (weight.data, weight.scale, weight.zero), (norm_weight, eps, offset)
    return _launch(workspace, x, None, held, normed, bias, residual, tile, x.dtype, constants)


def fp8_skinny(
    workspace: Workspace, x: torch.Tensor, scales: torch.Tensor | None, weight: Fp8, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float, offset: float, residual: torch.Tensor | None,
    tile: QuantizedSkinnyTile, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`linear` in `dtype`: of 2 to 8 rows that were quantized, numbers x [T, K] and their scales [T, groups]; or of one
    row of 16-bit floats, which is normed and quantized inside."""
    rule = weight.inputs
    quantize = (rule.scale is not None, rule.power_of_two, SMALLEST, FP8_MAX) if len(x) == 1 else None
    constants = {
        "PACKED": False, "ROWS": weight.block[0], "ZERO": False, "GROUPED": rule.group > 0, "QUANTIZE": quantize,
        "GROUP": 0 if weight.scale.shape[1] == 1 else weight.block[1],
    }  # fmt: skip
    given = rule.scale if scales is None else scales
    held, normed = (weight.data, weight.scale, None), (norm_weight, eps, offset)
    return _launch(workspace, x, given, held, normed, bias, residual, tile, dtype, constants)


def _words(x: torch.Tensor) -> torch.Tensor:
    """x's last dimension as words of 32 bits."""
    return x.view(torch.int32)


def _launch(
    workspace: Workspace, x: torch.Tensor, scales: torch.Tensor | None, held: tuple[Any, ...],
    normed: tuple[torch.Tensor | None, float, float], bias: torch.Tensor | None, residual: torch.Tensor | None,
    tile: QuantizedSkinnyTile, dtype: torch.dtype, constants: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """scales: x's, or the one given for all; held: the weight's numbers, scales and zero points; normed: the norm's
    weight, eps and offset."""
    (data, scale, zero), (norm_weight, eps, offset) = held, normed
    (m, k), n, blocks = x.shape, data.shape[0], x.shape[1] // WIDTH
    strides = (0, 0) if scales is None or scales.dim() < 2 else scales.stride()
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    rounds = cdiv(blocks, tile.warps)
    row_words = next_power_of_2(rounds) * tile.warps * (WIDTH // 2 if constants["PACKED"] else WIDTH // 4)
    workspace.launch(quantized_skinny_kernel, (cdiv(n, OUTPUTS),))(
        _words(x), scales, _words(data), scale, zero, bias, None if norm_weight is None else _words(norm_weight),
        residual, y, m, n, k, scale.shape[1], data.stride(0) * data.itemsize // 4, x.stride(0) * x.itemsize // 4,
        strides[0], strides[1], y.stride(0), residual.stride(0) if residual is not None else 0, eps, offset,
        AHEAD=min(tile.ahead, rounds), ROUNDS=rounds, EVEN=blocks % tile.warps == 0,
        ROW_WORDS=row_words if m == 1 else 0, DTYPE=_KINDS[dtype], NORM=norm_weight is not None, OFFSET=offset != 0.0,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl, **constants,
        num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return y
