# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Packed numbers of experts as an operand of the matrix unit, in Gluon: a thread unpacks 16 bytes of a row in registers
and gives them the scales of their groups.

A 32-bit word holds eight numbers. Those that stand four apart become a register of two bfloat16 by one shift and one
mask. Which inputs meet in an instruction does not matter, as long as the rows of x are taken in the same order
(`inputs_of`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of integers: 128 + u by its bits alone (Kim et al. 2022, arXiv:2211.10017), less 128 and the zero point, by their
# scale.
INT4 = gl.constexpr("""
{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $0, $0, $7;
sub.bf16x2 $1, $1, $7;
sub.bf16x2 $2, $2, $7;
sub.bf16x2 $3, $3, $7;
mul.bf16x2 $0, $0, $5;
mul.bf16x2 $1, $1, $5;
mul.bf16x2 $2, $2, $5;
mul.bf16x2 $3, $3, $5;
}
""")
# Of integers: 128 + u, in float16 1024 + u, with nothing taken off.
_BITS = """
{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000F000F, MAGIC, 0xEA;
lop3.b32 $1, a, 0x000F000F, MAGIC, 0xEA;
lop3.b32 $2, b, 0x000F000F, MAGIC, 0xEA;
lop3.b32 $3, c, 0x000F000F, MAGIC, 0xEA;
}
"""
BF16_BITS = gl.constexpr(_BITS.replace("MAGIC", "0x43004300"))
F16_BITS = gl.constexpr(_BITS.replace("MAGIC", "0x64006400"))
# Of e2m1: the exponent's two bits become the last of bfloat16's, 2^126 too low, which the scale makes up for: a
# register of signs and one of magnitudes for two numbers. Shifts to the left leave the logic unit to the masks.
FP4 = gl.constexpr("""
{
.reg .b32 r, s, t;
shr.u32 r, $4, 6;
shl.b32 s, $4, 12;
shl.b32 t, $4, 6;
and.b32 t, t, 0x01C001C0;
lop3.b32 $0, s, 0x80008000, t, 0xEA;
shl.b32 s, $4, 8;
shl.b32 t, $4, 2;
and.b32 t, t, 0x01C001C0;
lop3.b32 $1, s, 0x80008000, t, 0xEA;
shl.b32 s, $4, 4;
shl.b32 t, r, 4;
and.b32 t, t, 0x01C001C0;
lop3.b32 $2, s, 0x80008000, t, 0xEA;
and.b32 t, r, 0x01C001C0;
lop3.b32 $3, $4, 0x80008000, t, 0xEA;
mul.bf16x2 $0, $0, $5;
mul.bf16x2 $1, $1, $5;
mul.bf16x2 $2, $2, $5;
mul.bf16x2 $3, $3, $5;
}
""")
# A scale of 4-bit floats times 2^126 may be too large for bfloat16: it is held 2^64 too low, and sums are raised again.
# Scales above 2^65 are infinite then.
LOWERED = gl.constexpr(2.0**64)


@gluon.constexpr_function
def bytes_layout(height, warps):
    """The first operand's 16 bytes a thread, of its rows' share of a block [height, 64]."""
    again = [[16 * warps, 0]] if height > 16 * warps else []
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], *again]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    own = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, own, [], [height, 64])


@gluon.constexpr_function
def scales_layout(height, scales, warps=4):
    """That layout, of [height, scales, 64 / scales] bytes."""
    each = 64 // scales

    def base(byte: int) -> list[int]:
        return [0, byte // each, byte % each]

    again = [[16 * warps, 0, 0]] if height > 16 * warps else []
    registers = [*(base(1 << bit) for bit in range(4)), [8, 0, 0], *again]
    lanes = [base(16), base(32), [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    own = [[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, own, [], [height, scales, each])


@gluon.constexpr_function
def inputs_layout(rows, warps):
    """The other operand's 32 inputs a thread, of rows of x [rows, 128], which every warp reads."""
    more = [[1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], *more]
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    every = [[0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, every, [], [rows, 128])


@gluon.constexpr_function
def inputs_memory(rows):
    """Shared memory of rows of x [rows, 128], from which eight threads read eight banks of 16 bytes at once in
    `inputs_layout`, and in which copies of a row stand so too."""
    lower = [[1 << bit, 0] for bit in range(1, rows.bit_length() - 1)]
    columns = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [0, 64 + 16]]
    return gl.SharedLinearLayout([*columns, [1, 8], *lower])


@gluon.jit
def group_scales(ptr, rows, G, block, S: gl.constexpr, GROUP: gl.constexpr, BY_SCALES: gl.constexpr):
    """Scales of a block's groups as bits of bfloat16 [H, S] int16: none past a row's last. Those of 4-bit floats have
    the 2^126 that their numbers lack, and are LOWERED."""
    s = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, BY_SCALES)))
    group = block * S + s if GROUP < 256 else block * 128 // GROUP + s
    if GROUP == 0:
        group = s
    there = gl.expand_dims(group < G, 0) & gl.expand_dims(rows >= 0, 1)
    spots = ptr + gl.expand_dims(rows * G, 1) + gl.expand_dims(group, 0)
    if ptr.dtype.element_ty == gl.uint8:
        byte = gl.load(spots, mask=there, other=0).to(gl.int32)
        bits = gl.where(byte == 255, 0x7FC0, gl.minimum(byte + 62, 255) << 7).to(gl.int16)
    elif ptr.dtype.element_ty == gl.float8e4nv:
        raised = gl.load(spots, mask=there, other=0.0).to(gl.float32) * (2.0**126 / LOWERED)
        bits = raised.to(gl.bfloat16).to(gl.int16, bitcast=True)
    else:
        bits = gl.load(spots, mask=there, other=0.0).to(gl.bfloat16).to(gl.int16, bitcast=True)
    return bits


@gluon.jit
def spread(bits, BY_SCALES: gl.constexpr, BYTES: gl.constexpr, DTYPE: gl.constexpr = gl.bfloat16):
    """[H, S] int16 for each byte of a block, [H, 64] of DTYPE."""
    H: gl.constexpr = bits.shape[0]
    S: gl.constexpr = bits.shape[1]
    wide = gl.expand_dims(bits, 2) + gl.zeros([H, S, 64 // S], gl.int16, BY_SCALES)
    wide = gl.convert_layout(gl.reshape(wide, (H, 64)), BYTES, assert_trivial=True)
    return wide.to(DTYPE, bitcast=True)


@gluon.jit
def operand_of(low, high, OPERAND: gl.constexpr):
    """What a word's two registers of low and two of high numbers [H, 64] are of an operand [H, 128]."""
    H: gl.constexpr = low.shape[0]
    # [H, quarter, pair of bytes, byte, half]: two bytes of a half stand in a register
    w = gl.reshape(gl.join(low, high), (H, 4, 8, 2, 2))
    w = gl.reshape(gl.permute(w, (0, 2, 4, 1, 3)), (H, 128))
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def integers_of(bytes_, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Bytes [H, 64] of rows' 128 integers u as an operand [H, 128] of a product, as 128 + u (float16: 1024 + u)."""
    if gl.bfloat16 == DTYPE:
        low, high = gl.inline_asm_elementwise(
            BF16_BITS, "=&r,=&r,=&r,=&r,r", [bytes_], (gl.bfloat16, gl.bfloat16), True, 4
        )
    else:
        low, high = gl.inline_asm_elementwise(
            F16_BITS, "=&r,=&r,=&r,=&r,r", [bytes_], (gl.float16, gl.float16), True, 4
        )
    return operand_of(low, high, OPERAND)


@gluon.jit
def weights_of(bytes_, bits, zero, FLOAT: gl.constexpr, BY_SCALES: gl.constexpr, OPERAND: gl.constexpr):
    """Bytes [H, 64] of rows' 128 numbers with their scales as an operand [H, 128] of a product."""
    BYTES: gl.constexpr = bytes_.type.layout
    scale = spread(bits, BY_SCALES, BYTES)
    if FLOAT:
        low, high = gl.inline_asm_elementwise(
            FP4, "=&r,=&r,=&r,=&r,r,r,r", [bytes_, scale], (gl.bfloat16, gl.bfloat16), True, 4
        )
    else:
        low, high = gl.inline_asm_elementwise(
            INT4, "=&r,=&r,=&r,=&r,r,r,r,r,r", [bytes_, scale, spread(zero, BY_SCALES, BYTES)],
            (gl.bfloat16, gl.bfloat16), True, 4,
        )  # fmt: skip
    return operand_of(low, high, OPERAND)


@gluon.jit
def inputs_of(x, OPERAND: gl.constexpr):
    """Rows [BM, 128] as the other operand [128, BM], in the order of `weights_of`."""
    BM: gl.constexpr = x.shape[0]
    # [BM, quarter, word, which of two that are four apart, half, pair of bytes in a word]
    x = gl.reshape(x, (BM, 4, 4, 2, 2, 2))
    x = gl.reshape(gl.permute(x, (2, 5, 4, 1, 3, 0)), (128, BM))
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def row_layout(warps):
    """The other operand's 32 inputs a thread, of one row [8, 128] for every column, in the order in which a row stands
    that `row_of` takes: [word, quarter, pair of bytes in a word, half, which of two that are four apart]."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * (warps.bit_length() - 1), [], [8, 128])


@gluon.jit
def _row_operand(x, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    x = gl.reshape(x.to(DTYPE, bitcast=True), (8, 4, 4, 2, 2, 2))
    x = gl.reshape(gl.permute(x, (1, 3, 4, 2, 5, 0)), (128, 8))
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def row_of(row, DTYPE: gl.constexpr, WARPS: gl.constexpr, OPERAND: gl.constexpr):
    """A block of one row, [128] int16, as the other operand [128, 8], in the order of `weights_of`."""
    x = gl.expand_dims(row, 0) + gl.zeros([8, 128], gl.int16, row_layout(WARPS))
    return _row_operand(x, DTYPE, OPERAND)


@gluon.jit
def quarters_of(row, DTYPE: gl.constexpr, WARPS: gl.constexpr, OPERAND: gl.constexpr):
    """As `row_of`, but column c has zeros outside of the row's quarter c // 2, so that a product's columns are sums of
    32 inputs. Those that a thread holds are of one quarter: it has them all or none."""
    LAYOUT: gl.constexpr = row_layout(WARPS)
    place = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    own = gl.expand_dims((place >> 3) & 3, 0) == gl.expand_dims(column >> 1, 1)
    # a word of two inputs times one or zero: multiplications leave the logic unit to the integers' masks
    factor = (own & gl.expand_dims((place & 1) == 0, 0)).to(gl.int16)
    wide = gl.expand_dims(row, 0) + gl.zeros([8, 128], gl.int16, LAYOUT)
    x = gl.inline_asm_elementwise("mul.lo.s32 $0, $1, $2;", "=r,r,r", [wide, factor], gl.int16, True, 2)
    return _row_operand(x, DTYPE, OPERAND)


@gluon.jit
def zero_points(ptr, rows, G, block, S: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, BY_SCALES: gl.constexpr):
    """128 and the zero points of a block's groups as bits of bfloat16 [H, S] int16."""
    s = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, BY_SCALES)))
    group = block * S + s if GROUP < 256 else block * 128 // GROUP + s
    if GROUP == 0:
        group = s
    zero = gl.zeros([rows.shape[0], S], gl.int32, gl.SliceLayout(2, BY_SCALES)) + 8
    if ZERO:
        there = gl.expand_dims(group < G, 0) & gl.expand_dims(rows >= 0, 1)
        spots = ptr + gl.expand_dims(rows * G, 1) + gl.expand_dims(group, 0)
        zero = gl.load(spots, mask=there, other=0).to(gl.int32)
    return (zero + 128).to(gl.float32).to(gl.bfloat16).to(gl.int16, bitcast=True)
