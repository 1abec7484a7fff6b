# mypy: disable-error-code="no-untyped-def,attr-defined,assignment,misc"
"""Products of few rows with blocks of GGUF files, in Gluon.

A program gives 16 outputs and shares nothing with another: its warps take every W-th unit of 256 inputs, and their sums
meet at the end. Nothing loops: bits go from memory into registers, where they become an operand of the matrix
instructions (`gguf_operand`), some units ahead.

Groups of 32 inputs have scales of their own. A column of the other operand is a group: it holds the inputs of its own
and zeros of others, so that one matrix of sums [16, 8] takes all of a unit, of which each thread scales four sums. Each
row of x has such a matrix. A product with ones gives the groups' sums of inputs, by which zero points and least values
are taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import register_products
from kernels.hopper.epilogue import activate
from kernels.linear.gguf_operand import (
    FORMS,
    added,
    along,
    along_rows,
    along_warps,
    chunk,
    chunk_of,
    coming_scales,
    form_of,
    header_layout,
    inputs,
    inputs_layout,
    num_chunks,
    numbers,
    paired_inputs,
    scales_of,
    unit_bytes,
    words_layout,
)
from kernels.linear.quantized_operand import KINDS, halves_of, times
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import GgufBlocks
from kernels.workspace import Workspace

# Inputs of a unit, outputs and most rows of a program, the most rows of x.
WIDTH, OUTPUTS, EACH, MAX_ROWS = 256, 16, 4, 16
# The most inputs: code without a loop.
MAX_INPUTS = 32768


@gluon.jit
def _place(first, behind, N, unit, units, stride, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, 16, 1]: where units `unit` + w of rows from `first` on begin, `behind` rows further; the last in the place of
    those that are not there."""
    row = (gl.minimum(first + along_rows(16, LAYOUT), N - 1) + behind).to(gl.int64)
    return row * stride + gl.minimum(unit + along_warps(LAYOUT), units - 1) * SIZE


@gluon.jit
def _coming(word_ptr, short_ptr, half_ptr, first, behind, N, unit, units, B, FORMAT: gl.constexpr,
            CELLS: gl.constexpr):  # fmt: skip
    """Units on their way: chunks of low bits, chunks of high bits, scales."""
    ALIGN: gl.constexpr = form_of(FORMAT).align
    WORD: gl.constexpr = 4 if ALIGN >= 4 else 2
    BYTES: gl.constexpr = unit_bytes(FORMAT)
    LAYOUT: gl.constexpr = words_layout(FORMAT, gl.num_warps())
    HEADER: gl.constexpr = header_layout(gl.num_warps())
    start = _place(first, behind, N, unit, units, B * (ALIGN // WORD), BYTES // WORD, LAYOUT)
    low, high = (), ()
    for i in gl.static_range(num_chunks(FORMAT, False)):
        low = low + (chunk(word_ptr, short_ptr, start, False, i, FORMAT, LAYOUT),)  # noqa: RUF005
    for i in gl.static_range(num_chunks(FORMAT, True)):
        high = high + (chunk(word_ptr, short_ptr, start, True, i, FORMAT, LAYOUT),)  # noqa: RUF005
    n = along(8, CELLS)
    own = _place(first, behind, N, unit, units, B * (ALIGN // 2), BYTES // 2, CELLS)
    header = _place(first, behind, N, unit, units, B * (ALIGN // WORD), BYTES // WORD, HEADER)
    return low, high, coming_scales(word_ptr, short_ptr, half_ptr, header, own, n, FORMAT)


@gluon.jit
def _row_units(ptr, unit, units, live, FORMAT: gl.constexpr):
    """Inputs of units `unit` + w of a row, as words of two [W, 8, 16]: zeros where there are none."""
    LAYOUT: gl.constexpr = inputs_layout(FORMAT, gl.num_warps())
    spot = (unit + along_warps(LAYOUT)) * 128 + along_rows(8, LAYOUT) * 16 + along(16, LAYOUT)
    return gl.load(ptr + spot, mask=(spot < units * 128) & live, other=0)


@gluon.jit
def _rows_coming(x_ptr, x_stride, row, M, unit, units, ROWS: gl.constexpr, FORMAT: gl.constexpr):
    """Such of rows from `row` on."""
    x = ()
    for m in gl.static_range(ROWS):
        place = x_ptr + gl.minimum(row + m, M - 1).to(gl.int64) * x_stride
        x = x + (_row_units(place, unit, units, row + m < M, FORMAT),)  # noqa: RUF005
    return x


@gluon.jit
def _products(sums, x, coming, FORMAT: gl.constexpr, DTYPE: gl.constexpr, CELLS: gl.constexpr):
    """sums [W, 16, 8] of each row, with those of units more: x are the rows' inputs as words, and what came of them is
    `_coming`. Columns are groups."""
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = len(x)
    left: gl.constexpr = gl.DotOperandLayout(0, CELLS, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, CELLS, 2)
    STEPS: gl.constexpr = form_of(FORMAT).steps
    ADDED: gl.constexpr = added(FORMAT, gl.bfloat16 == DTYPE)
    none = gl.zeros((W, 16, 8), gl.float32, CELLS)
    near, far, evens, odds = (), (), (), ()
    for m in gl.static_range(ROWS):
        near = near + (none,)  # noqa: RUF005
        far = far + (none,)  # noqa: RUF005
        even, odd = paired_inputs(x[m])
        evens = evens + (even,)  # noqa: RUF005
        odds = odds + (odd,)  # noqa: RUF005
    PAIRS: gl.constexpr = evens[0].type.layout
    column = along_rows(8, PAIRS) + gl.zeros([W, 8, 8], gl.int32, PAIRS)
    for group in gl.static_range(8):
        mask = gl.where(column == group, -1, 0)
        low = coming[0][chunk_of(FORMAT, False, group)]
        high = low
        if num_chunks(FORMAT, True) > 0:
            high = coming[1][chunk_of(FORMAT, True, group)]
        for upper in gl.static_range(2 if form_of(FORMAT).wide else 1):
            w, w_far = numbers(low, high, group, upper == 1, FORMAT, DTYPE, left)
            for m in gl.static_range(ROWS):
                own, own_far = inputs(evens[m], odds[m], mask, FORMAT, DTYPE, right)
                near = near[:m] + (mma_v2(w, own, near[m]),) + near[m + 1 :]  # noqa: RUF005
                if STEPS:
                    far = far[:m] + (mma_v2(w_far, own_far, far[m]),) + far[m + 1 :]  # noqa: RUF005
                else:
                    near = near[:m] + (mma_v2(w_far, own_far, near[m]),) + near[m + 1 :]  # noqa: RUF005
    n = along(8, CELLS)
    scale, least, scale_far, least_far = scales_of(coming[2], n, FORMAT, CELLS)
    ones = gl.full((W, 16, 16), 1.0, DTYPE, left)
    every = gl.full([W, 8, 8], -1, gl.int32, PAIRS)
    made = ()
    for m in gl.static_range(ROWS):
        own, own_far = inputs(evens[m], odds[m], every, FORMAT, DTYPE, right)
        total = mma_v2(ones, own, none)
        if STEPS:
            total_far = mma_v2(ones, own_far, none)
            more = (near[m] - ADDED * total) * scale + total * least
            more += (far[m] - ADDED * total_far) * scale_far + total_far * least_far
        else:
            total = mma_v2(ones, own_far, total)
            more = (near[m] - ADDED * total) * scale + total * least
        made = made + (sums[m] + more,)  # noqa: RUF005
    return made


@gluon.jit(do_not_specialize=["M"])
def gguf_vector_kernel(
    x_ptr, norm_ptr, word_ptr, short_ptr, half_ptr, bias_ptr, residual_ptr, y_ptr,
    M, N, K, B, x_stride, y_stride, residual_stride, eps, offset,
    ROWS: gl.constexpr, AHEAD: gl.constexpr, X_AHEAD: gl.constexpr, ROUNDS: gl.constexpr,
    FORMAT: gl.constexpr, DTYPE: gl.constexpr,
    NORM: gl.constexpr, OFFSET: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid (M/ROWS, N/16): programs of the same outputs follow each other. With ACT the weight has 2N rows. x and its
    norm's weight are read as words of two 16-bit floats of DTYPE, x_stride counts those; a row that NORM norms stands
    alone. The weight's bytes are read as words of 32 bits, of 16 and as 16-bit floats; B counts bytes of a row as
    multiples of what the format stands on.

    AHEAD: units of a warp that are on their way, X_AHEAD: those whose inputs are. ROUNDS: units of a warp.
    """
    W: gl.constexpr = gl.num_warps()
    CELLS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    WIDE: gl.constexpr = 1 if ACT is None else 2
    STEPS: gl.constexpr = ROUNDS * WIDE
    row = gl.program_id(0) * ROWS
    first = gl.program_id(1) * 16
    units = K // 256
    if PDL:
        gdc_launch_dependents()
    coming, gs, xs = (), (), ()
    for step in gl.static_range(AHEAD):
        own = _coming(
            word_ptr, short_ptr, half_ptr, first, N * (step % WIDE), N, step // WIDE * W, units, B, FORMAT, CELLS
        )
        coming = coming + (own,)  # noqa: RUF005
    for turn in gl.static_range(X_AHEAD):
        if NORM:
            gs = gs + (_row_units(norm_ptr, turn * W, units, M > 0, FORMAT),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    for turn in gl.static_range(X_AHEAD):
        xs = xs + (_rows_coming(x_ptr, x_stride, row, M, turn * W, units, ROWS, FORMAT),)  # noqa: RUF005
    none = gl.zeros((W, 16, 8), gl.float32, CELLS)
    acc, acc_up = (), ()
    for _ in gl.static_range(ROWS):
        acc = acc + (none,)  # noqa: RUF005
        acc_up = acc_up + (none,)  # noqa: RUF005
    squares = gl.zeros([W, 8, 16], gl.float32, inputs_layout(FORMAT, W))
    x = ()
    for step in gl.static_range(STEPS):
        if step % WIDE == 0:
            x = xs[0]
            xs = xs[1:]
            unit = (step // WIDE + X_AHEAD) * W
            if step // WIDE + X_AHEAD < ROUNDS:
                xs = xs + (_rows_coming(x_ptr, x_stride, row, M, unit, units, ROWS, FORMAT),)  # noqa: RUF005
            if NORM:
                low, high = halves_of(x[0], DTYPE)
                low, high = low.to(gl.float32), high.to(gl.float32)
                squares += low * low + high * high
                x = (times(x[0], gs[0], offset, DTYPE, OFFSET),)
                gs = gs[1:]
                if step // WIDE + X_AHEAD < ROUNDS:
                    gs = gs + (_row_units(norm_ptr, unit, units, M > 0, FORMAT),)  # noqa: RUF005
        now = coming[0]
        coming = coming[1:]
        if step + AHEAD < STEPS:
            behind, unit = N * ((step + AHEAD) % WIDE), (step + AHEAD) // WIDE * W
            own = _coming(word_ptr, short_ptr, half_ptr, first, behind, N, unit, units, B, FORMAT, CELLS)
            coming = coming + (own,)  # noqa: RUF005
        if step % WIDE == 0:
            acc = _products(acc, x, now, FORMAT, DTYPE, CELLS)
        else:
            acc_up = _products(acc_up, x, now, FORMAT, DTYPE, CELLS)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.reshape(squares, (W * 128,)), axis=0) / K + eps)
    for m in gl.static_range(ROWS):
        y = gl.sum(gl.sum(acc[m], axis=2), axis=0) * factor
        n = first + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, CELLS)))
        if BIAS:
            y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
        if ACT is not None:
            up = gl.sum(gl.sum(acc_up[m], axis=2), axis=0) * factor
            if BIAS:
                up += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)
            y = activate(y, ACT) * up
        stored = (n < N) & (row + m < M)
        spot = (n * 0 + row + m).to(gl.int64)
        if RESIDUAL:
            y += gl.load(residual_ptr + spot * residual_stride + n, mask=stored, other=0.0).to(gl.float32)
        gl.store(y_ptr + spot * y_stride + n, y.to(y_ptr.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class GgufVectorTile:
    """How `gguf_vector_kernel` is cut: warps (4 or 8) that share a program's inputs, and units of a warp that are on
    their way."""

    warps: int
    ahead: int


def reads_blocks(x: torch.Tensor, weight: GgufBlocks) -> bool:
    """Whether `gguf_vector` takes rows x [T, K] and a weight's parts: 16-bit rows of whole units, formats of `FORMS`,
    on a GPU whose warps multiply from registers."""
    return (
        len(x) <= MAX_ROWS
        and x.dtype in KINDS
        and x.shape[1] % WIDTH == 0
        and x.shape[1] <= MAX_INPUTS
        and x.stride(1) == 1
        and x.stride(0) % 2 == 0
        and x.data_ptr() % 16 == 0
        and all(name in FORMS for name in weight.formats)
        and all(part.data_ptr() % 16 == 0 for part in weight.parts)
        and register_products(x.device)
    )


def gguf_vector(
    workspace: Workspace, x: torch.Tensor, part: torch.Tensor, name: str, bias: torch.Tensor | None,
    normed: tuple[torch.Tensor | None, float, float], residual: torch.Tensor | None, y: torch.Tensor,
    activation: str | None, tile: GgufVectorTile,
) -> None:  # fmt: skip
    """y [T, N] of x [T, K] and rows `part` in one format; y's and residual's rows may be strided, residual may be y.
    normed: weight, eps and offset of the norm of one row."""
    (rows, n), k = y.shape, x.shape[1]
    norm_weight, eps, offset = normed
    align = FORMS[name].align
    rounds = cdiv(k // WIDTH, tile.warps)
    words = part.view(torch.int32) if align >= 4 else None
    height = min(next_power_of_2(rows), EACH)
    workspace.launch(gguf_vector_kernel, (cdiv(rows, height), cdiv(n, OUTPUTS)))(
        x.view(torch.int32), None if norm_weight is None else norm_weight.view(torch.int32), words,
        part.view(torch.int16), part.view(torch.float16), bias, residual, y,
        rows, n, k, part.shape[-1] // align, x.stride(0) // 2, y.stride(0),
        0 if residual is None else residual.stride(0), eps, offset,
        ROWS=height, AHEAD=min(tile.ahead, rounds), X_AHEAD=min(2, rounds), ROUNDS=rounds,
        FORMAT=name, DTYPE=KINDS[x.dtype],
        NORM=norm_weight is not None, OFFSET=offset != 0.0, ACT=activation, BIAS=bias is not None,
        RESIDUAL=residual is not None, PDL=workspace.pdl, num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
