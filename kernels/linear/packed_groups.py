# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Scales and zero points of groups of 32 or 64 inputs, in Gluon: a stage's are asked for while the one before it is
multiplied, and stand in registers as they are stored until then."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.linear.packed_operand import operand_of, spread
from kernels.weight import PackedInt

# Groups that divide a block of 128 inputs, and hold what a thread unpacks at once.
FINE = (32, 64)
# Where the halves of four bytes come from: by words, as `packed_operand` takes them, or by pairs of bytes, as
# `quantized_stream` takes them for many rows; a register each, and whether its integers stand in the upper half.
_SOURCES = {
    "words": ("shr.u32 a, $4, 8;", (("$4", 0), ("$4", 4), ("a", 0), ("a", 4))),
    "pairs": ("prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;", (("a", 0), ("b", 0), ("a", 4), ("b", 4))),
}


def _bf16(order: str, zero: bool) -> gl.constexpr:
    """Bits b, up to 256, are b · 2^-133 as bfloat16. So an integer needs no exponent, nor a shift where it stands in
    the upper half of a byte: its scale makes up for both, and what is left is 2^64 too low. Half of the integers'
    range, 8, by a scale is exact: without zero points the difference and the product are one instruction, rounded once.
    Scales above 2^58 are infinite."""
    first, sources = _SOURCES[order]
    text = f"{{ .reg .b32 a, b, c, s, t, u, v; {first} "
    # 2^69, 2^65 and -2^-61
    text += "mov.b32 c, 0x62006200; mul.bf16x2 s, $5, c; mov.b32 c, 0x60006000; mul.bf16x2 t, $5, c; "
    if zero:
        text += "mov.b32 u, $7; shl.b32 v, $7, 4; "
    else:
        text += "mov.b32 c, 0xA100A100; mul.bf16x2 u, $5, c; "
    for to, (source, up) in enumerate(sources):
        text += f"and.b32 ${to}, {source}, {0x000F000F << up:#x}; "
        factor = "t" if up else "s"
        if zero:
            text += f"sub.bf16x2 ${to}, ${to}, {'v' if up else 'u'}; mul.bf16x2 ${to}, ${to}, {factor}; "
        else:
            text += f"fma.rn.bf16x2 ${to}, ${to}, {factor}, u; "
    return gl.constexpr(text + "}")


def _f16(order: str, zero: bool) -> gl.constexpr:
    """1024 + u by an integer's bits alone, less that and the zero point, by the scale."""
    first, sources = _SOURCES[order]
    text = f"{{ .reg .b32 a, b, t, u; {first} "
    text += "or.b32 u, $7, 0x64006400; " if zero else "mov.b32 u, 0x64086408; "
    for to, (source, up) in enumerate(sources):
        text += f"shr.u32 t, {source}, {up}; " if up else f"mov.b32 t, {source}; "
        text += f"lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 t, t, u; mul.f16x2 ${to}, t, $5; "
    return gl.constexpr(text + "}")


BF16_WORDS, BF16_WORDS_ZERO = _bf16("words", False), _bf16("words", True)
BF16_PAIRS, BF16_PAIRS_ZERO = _bf16("pairs", False), _bf16("pairs", True)
F16_WORDS, F16_WORDS_ZERO = _f16("words", False), _f16("words", True)
F16_PAIRS, F16_PAIRS_ZERO = _f16("pairs", False), _f16("pairs", True)
# What sums of such integers are multiplied by.
LOWERED = gl.constexpr(2.0**64)


@gluon.jit
def unit_groups(
    scale_ptr, zero_ptr, rows, up, offsets, G, block,
    BLOCKS: gl.constexpr, EACH: gl.constexpr, WIDE: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """What belongs to `block` and those behind it, BLOCKS in all: for each, of a row and with WIDE 2 of the row `up`
    behind it, scales [H, C] and with ZERO zero points [H, C], in one tuple.

    rows [H] int64, negative where there is none. offsets [C]: groups from a block's first, of which it has EACH. Zeros
    stand behind a row's G-th group.
    """
    made = ()
    for i in gl.static_range(BLOCKS):
        group = offsets + (block + i) * EACH
        there = gl.expand_dims(rows >= 0, 1) & gl.expand_dims(group < G, 0)
        for half in gl.static_range(WIDE):
            spot = gl.expand_dims((rows + half * up) * G, 1) + gl.expand_dims(group, 0)
            made = made + (gl.load(scale_ptr + spot, mask=there, other=0.0),)  # noqa: RUF005
            if ZERO:
                made = made + (gl.load(zero_ptr + spot, mask=there, other=0),)  # noqa: RUF005
    return made


@gluon.jit
def scaled_integers(
    bytes_, scale, zero, ZERO: gl.constexpr, ORDERED: gl.constexpr, BY_SCALES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Bytes [H, 64] of rows' 128 integers, less their zero points and times their scales [H, S] in x's dtype, as an
    operand [H, 128] of a product: in the order of `packed_operand.inputs_of`, or, ORDERED, of `order_inputs`. They are
    LOWERED in bfloat16."""
    BYTES: gl.constexpr = bytes_.type.layout
    factor = spread(scale.to(gl.int16, bitcast=True), BY_SCALES, BYTES, scale.dtype)
    given: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r" if ZERO else "=&r,=&r,=&r,=&r,r,r,r"
    args = [bytes_, factor, spread(zero.to(gl.int16), BY_SCALES, BYTES, scale.dtype)] if ZERO else [bytes_, factor]
    bf16_words: gl.constexpr = BF16_WORDS_ZERO if ZERO else BF16_WORDS
    bf16_pairs: gl.constexpr = BF16_PAIRS_ZERO if ZERO else BF16_PAIRS
    f16_words: gl.constexpr = F16_WORDS_ZERO if ZERO else F16_WORDS
    f16_pairs: gl.constexpr = F16_PAIRS_ZERO if ZERO else F16_PAIRS
    bf16: gl.constexpr = bf16_pairs if ORDERED else bf16_words
    f16: gl.constexpr = f16_pairs if ORDERED else f16_words
    if scale.dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(bf16, given, args, (gl.bfloat16, gl.bfloat16), True, 4)
    else:
        low, high = gl.inline_asm_elementwise(f16, given, args, (gl.float16, gl.float16), True, 4)
    return operand_of(low, high, OPERAND)


@gluon.constexpr_function
def quarters_layout(height, warps):
    """Sums [height, 8] of a product with `quarters_of` a row: [height, quarter, two equal ones]."""
    again = [[16 * warps, 0, 0]] if height > 16 * warps else []
    registers = [[0, 0, 1], [8, 0, 0], *again]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    own = [[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, own, [], [height, 4, 2])


@gluon.jit
def quarter_sums(part, QUARTERS: gl.constexpr):
    """Sums [.., 8] of such a product, of each quarter one [.., 4]. QUARTERS: the layout of [.., 4, 2]."""
    wide = gl.reshape(part, part.shape[:-1] + [4, 2])  # noqa: RUF005
    one, _ = gl.split(gl.convert_layout(wide, QUARTERS, assert_trivial=True))
    return gl.convert_layout(one, gl.SliceLayout(len(part.shape), QUARTERS), assert_trivial=True)


@gluon.constexpr_function
def is_fine(group):
    """Whether a block has several groups; 0 is one group for all inputs."""
    return 0 < group < 128


def fine(weight: PackedInt) -> bool:
    """Whether a weight of whole blocks has such groups."""
    return weight.group in FINE and weight.inputs % 128 == 0
