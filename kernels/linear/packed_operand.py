# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Packed numbers of experts as an operand of the matrix unit, in Gluon: a thread unpacks 16 bytes of a row in registers
and gives them the scales of their groups."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LANES = """
{
.reg .b32 a, b, s, t, c;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
"""
# Low halves of two bytes, then their high halves, as bfloat16. Of integers: 128 + u by its bits alone, less 128 and the
# zero point, by their scale.
_INT4 = """
lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $0, $0, $7;
sub.bf16x2 $1, $1, $8;
sub.bf16x2 $2, $2, $7;
sub.bf16x2 $3, $3, $8;
"""
# Of e2m1: the exponent's two bits become the last of bfloat16's, 2^126 too low.
_FP4 = """
shl.b32 t, a, 6;
shl.b32 s, a, 12;
and.b32 t, t, 0x01C001C0;
lop3.b32 $0, s, 0x80008000, t, 0xEA;
shl.b32 t, b, 6;
shl.b32 s, b, 12;
and.b32 t, t, 0x01C001C0;
lop3.b32 $1, s, 0x80008000, t, 0xEA;
shl.b32 t, a, 2;
shl.b32 s, a, 8;
and.b32 t, t, 0x01C001C0;
lop3.b32 $2, s, 0x80008000, t, 0xEA;
shl.b32 t, b, 2;
shl.b32 s, b, 8;
and.b32 t, t, 0x01C001C0;
lop3.b32 $3, s, 0x80008000, t, 0xEA;
mov.b32 c, 0x7E807E80;
mul.bf16x2 $0, $0, c;
mul.bf16x2 $1, $1, c;
mul.bf16x2 $2, $2, c;
mul.bf16x2 $3, $3, c;
"""
_SCALE = """
mul.bf16x2 $0, $0, $5;
mul.bf16x2 $1, $1, $6;
mul.bf16x2 $2, $2, $5;
mul.bf16x2 $3, $3, $6;
}
"""
INT4, FP4 = gl.constexpr(_LANES + _INT4 + _SCALE), gl.constexpr(_LANES + _FP4 + _SCALE)
# The first operand's 16 bytes a thread, for its row's share of a block; by scales a block.
_ROWS = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
_WARPS = [[16, 0, 0], [32, 0, 0]]


def _by_scales(scales: int) -> gl.constexpr:
    """The layout of [64, scales, 64 / scales] bytes of a block: as `quantized_stream` has [64, 64]."""
    each = 128 // 2 // scales

    def base(byte: int) -> list[int]:
        return [0, byte // each, byte % each]

    registers = [*(base(1 << bit) for bit in range(4)), [8, 0, 0]]
    lanes = [base(16), base(32), *_ROWS]
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, _WARPS, [], [64, scales, each]))


BY_1_SCALES, BY_2_SCALES, BY_4_SCALES, BY_8_SCALES = _by_scales(1), _by_scales(2), _by_scales(4), _by_scales(8)


@gluon.jit
def group_scales(ptr, rows, G, block, S: gl.constexpr, GROUP: gl.constexpr, BY_SCALES: gl.constexpr):
    """Scales of a block's groups as bits of bfloat16 [64, S] int16: none past a row's last."""
    s = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, BY_SCALES)))
    group = block * S + s if GROUP < 256 else block * 128 // GROUP + s
    if GROUP == 0:
        group = s
    there = gl.expand_dims(group < G, 0) & gl.expand_dims(rows >= 0, 1)
    spots = ptr + gl.expand_dims(rows * G, 1) + gl.expand_dims(group, 0)
    if ptr.dtype.element_ty == gl.uint8:
        byte = gl.load(spots, mask=there, other=0).to(gl.int32)
        bits = gl.where(byte == 0, gl.where(there, 0x40, 0), gl.where(byte == 255, 0x7FC0, byte << 7)).to(gl.int16)
    else:
        bits = gl.load(spots, mask=there, other=0.0).to(gl.bfloat16).to(gl.int16, bitcast=True)
    return bits


@gluon.jit
def spread(bits, BY_SCALES: gl.constexpr, BYTES: gl.constexpr):
    """[64, S] int16 for each byte of a block, [64, 64] bfloat16."""
    S: gl.constexpr = bits.shape[1]
    wide = gl.expand_dims(bits, 2) + gl.zeros([64, S, 64 // S], gl.int16, BY_SCALES)
    wide = gl.convert_layout(gl.reshape(wide, (64, 64)), BYTES, assert_trivial=True)
    return wide.to(gl.bfloat16, bitcast=True)


@gluon.jit
def weights_of(bytes_, bits, zero, FLOAT: gl.constexpr, BY_SCALES: gl.constexpr, OPERAND: gl.constexpr):
    """Bytes [64, 64] of rows' 128 numbers with their scales as an operand [64, 128] of a product."""
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
    w = gl.reshape(gl.join(low, high), (64, 4, 8, 2, 2))
    w = gl.reshape(gl.permute(w, (0, 2, 4, 1, 3)), (64, 128))
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def zero_points(ptr, rows, G, block, S: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, BY_SCALES: gl.constexpr):
    """128 and the zero points of a block's groups as bits of bfloat16 [64, S] int16."""
    s = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, BY_SCALES)))
    group = block * S + s if GROUP < 256 else block * 128 // GROUP + s
    if GROUP == 0:
        group = s
    zero = gl.zeros([64, S], gl.int32, gl.SliceLayout(2, BY_SCALES)) + 8
    if ZERO:
        there = gl.expand_dims(group < G, 0) & gl.expand_dims(rows >= 0, 1)
        spots = ptr + gl.expand_dims(rows * G, 1) + gl.expand_dims(group, 0)
        zero = gl.load(spots, mask=there, other=0).to(gl.int32)
    return (zero + 128).to(gl.float32).to(gl.bfloat16).to(gl.int16, bitcast=True)
