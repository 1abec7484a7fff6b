# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Two or four rows of x in shared memory, in Gluon, in the order in which an operand of the matrix instructions takes
them: what a program of `quantized_row_stream` meets of them, with the sums of blocks of 128 inputs.

Column c of the operand is row c % ROWS. Places of 16 bytes are exchanged, so that threads that read them do not meet in
a bank.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

# Inputs of a thread that are on their way at once: registers hold two.
COMING_INPUTS = 160


@gluon.constexpr_function
def _bits(number):
    return number.bit_length() - 1


@gluon.constexpr_function
def coming_layout(rows, blocks, warps):
    """Of a unit [blocks, rows, 128] on its way: a thread has 8 inputs beside each other, few threads have a row."""
    high = min(blocks, warps)
    beside = max(1, min(rows, warps // high))
    lanes = rows // beside
    return gl.BlockedLayout([1, 1, 8], [1, lanes, 32 // lanes], [high, warps // high, 1], [2, 1, 0])


@gluon.constexpr_function
def rows_memory(rows, blocks=1):
    """Shared memory of blocks of rows: [block, word, row, quarter, pair of bytes in a word, half, which of two that are
    four apart]; the places of a row's quarters differ by word."""
    inside = [[1 << bit] for bit in range(5 + _bits(rows))]
    above = [[128 * rows << bit] for bit in range(_bits(blocks))]
    return gl.SharedLinearLayout([*inside, [32 * rows + 8], [64 * rows + 16], *above])


@gluon.constexpr_function
def rows_layout(rows, warps):
    """The operand's 32 inputs a thread of a block in that order [8 / rows, 128 · rows]: columns beyond the rows hold
    them again."""
    own = _bits(rows)
    registers = [[0, 1], [0, 2], [0, 4], [0, 32 * rows], [0, 64 * rows]]
    columns = [*([0, 32 << bit] for bit in range(own)), *([1 << bit, 0] for bit in range(3 - own))]
    every = [[0, 0]] * _bits(warps)
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], *columns], every, [], [8 // rows, 128 * rows])


@gluon.constexpr_function
def columns_layout(rows, warps):
    """The columns of the matrix instructions' sums as [8 / rows, rows]."""
    own = _bits(rows)
    columns = [*([0, 1 << bit] for bit in range(own)), *([1 << bit, 0] for bit in range(3 - own))]
    lanes = [columns[1], columns[2], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout([columns[0]], lanes, [[0, 0]] * _bits(warps), [], [8 // rows, rows])


@gluon.constexpr_function
def _at_once(rows, blocks, warps):
    """Units whose inputs are on their way at once."""
    return max(1, COMING_INPUTS // max(8, rows * blocks * 4 // warps))


@gluon.jit
def _row_units(ptr, first_slice, slices, count, M, stride, BEGIN: gl.constexpr, END: gl.constexpr,
               ROWS: gl.constexpr, BLOCKS: gl.constexpr, COMING: gl.constexpr):  # fmt: skip
    """Rows [BLOCKS, ROWS, 128] of units BEGIN to END, the first unit at first_slice: zero from the count-th unit and
    from the M-th row on."""
    BY: gl.constexpr = gl.SliceLayout(2, COMING)
    block = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(1, BY)), 1) * 128
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, BY)), 0)
    place = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, COMING)))
    spot = gl.expand_dims(row.to(gl.int64) * stride + block, 2) + gl.expand_dims(gl.expand_dims(place, 0), 1)
    there = gl.expand_dims((row < M) & (block >= 0), 2)
    made = ()
    for unit in gl.static_range(BEGIN, END):
        at = first_slice + unit
        at = gl.where(at >= slices, at - slices, at) * (BLOCKS * 128)
        made = made + (gl.load(ptr + at + spot, mask=there & (unit < count), other=0.0),)  # noqa: RUF005
    return made


@gluon.jit
def _stage_unit(x, held, totals):
    """Stores a unit's rows [BLOCKS, ROWS, 128] and the sums of their blocks."""
    BLOCKS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    totals.store(gl.reshape(gl.sum(x.to(gl.float32), axis=2), (BLOCKS * ROWS,)))
    # [block, row, quarter, word, which of two that are four apart, half, pair of bytes in a word]
    x = gl.reshape(x.to(gl.int16, bitcast=True), (BLOCKS, ROWS, 4, 4, 2, 2, 2))
    held.store(gl.reshape(gl.permute(x, (0, 3, 1, 2, 6, 5, 4)), (BLOCKS * ROWS * 128,)))


@gluon.jit
def stage_rows(
    x_ptr, held, totals, first_slice, slices, count, M, stride, ROWS: gl.constexpr, BLOCKS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Stores what `count` units meet of M rows, each unit of BLOCKS blocks at the slice behind the one before, from
    first_slice on: held [units, BLOCKS · ROWS · 128] int16, and totals [units, BLOCKS · ROWS] float32. Waits for the
    kernel before."""
    UNITS: gl.constexpr = held.shape[0]
    COMING: gl.constexpr = coming_layout(ROWS, BLOCKS, gl.num_warps())
    EACH: gl.constexpr = _at_once(ROWS, BLOCKS, gl.num_warps())
    if PDL:
        gdc_wait()
    for begin in gl.static_range(0, UNITS, EACH):
        x = _row_units(
            x_ptr, first_slice, slices, count, M, stride, begin, min(begin + EACH, UNITS), ROWS, BLOCKS, COMING
        )
        for unit in gl.static_range(begin, min(begin + EACH, UNITS)):
            _stage_unit(x[unit - begin], held.index(unit), totals.index(unit))


@gluon.jit
def rows_of(block, ROWS: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """A block in shared memory [128 · ROWS] as the operand [128, 8], in the order of `packed_operand.weights_of`."""
    LAYOUT: gl.constexpr = rows_layout(ROWS, gl.num_warps())
    x = gl.expand_dims(block.load(gl.SliceLayout(0, LAYOUT)), 0)
    x = (x + gl.zeros([8 // ROWS, 128 * ROWS], gl.int16, LAYOUT)).to(DTYPE, bitcast=True)
    x = gl.reshape(x, (8 // ROWS, 4, ROWS, 4, 2, 2, 2))
    x = gl.reshape(gl.permute(x, (1, 4, 5, 3, 6, 0, 2)), (128, 8))
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def totals_of(block, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A block's sums in shared memory [ROWS] as those of columns [8]."""
    LAYOUT: gl.constexpr = columns_layout(ROWS, gl.num_warps())
    sums = gl.expand_dims(block.load(gl.SliceLayout(0, LAYOUT)), 0) + gl.zeros([8 // ROWS, ROWS], gl.float32, LAYOUT)
    return gl.convert_layout(gl.reshape(sums, (8,)), COLUMNS, assert_trivial=True)


@gluon.jit
def rows_alone(acc, ROWS: gl.constexpr):
    """Of columns [BN, 8] those of rows, [BN, ROWS]: the others are equal to them."""
    MMA: gl.constexpr = acc.type.layout
    sums = gl.sum(gl.reshape(acc, (acc.shape[0], 8 // ROWS, ROWS)), axis=1) * (ROWS / 8)
    return gl.convert_layout(sums, MMA, assert_trivial=True)
