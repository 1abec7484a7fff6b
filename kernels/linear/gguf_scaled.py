# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Q4_K blocks of GGUF files with their scales as an operand of `mma.sync`, in registers, for products whose columns are
rows of x.

Of a group of 32 inputs a thread has a row's two words (`gguf_operand`). Two bytes beside each other become a register
of two 16-bit floats, where their bits stand, and one instruction multiplies them by their scale and adds what is added.
In bfloat16 bits b, up to 255, are b · 2^-133: an integer needs no exponent. Its scale makes up for that and for the
place of the bits in a byte, and what is left is 2^64 too low. In float16 bits stand behind an exponent, and an
instruction takes that off.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.linear.gguf_operand import (
    BF16_REGISTERS,
    F16_REGISTERS,
    FORMS,
    FOUR_WORDS,
    scales_of,
)

# What sums are multiplied by in bfloat16. Scales above 2^58 are infinite.
LOWERED = gl.constexpr(2.0**64)
BF16_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
F16_PAIR = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
PAIR = gl.constexpr("=r,r,r")


@gluon.constexpr_function
def place(name, group):
    """The bit of a byte at which a group's numbers stay."""
    return FORMS[name].low.shift[group]


@gluon.constexpr_function
def scaled_asm(name, group, bf16):
    """Of a thread's two words of bits and twice a word of scale and of what is added: registers (i, h), step i's bytes
    2h and 2h + 1."""
    stays, exponent = place(name, group), 0 if bf16 else 0x64006400
    text = "{ .reg .b32 t, u, s, a, z; .reg .b16 x, y; mov.b32 {x, y}, $6; mov.b32 s, {x, x}; mov.b32 a, {y, y}; "
    for i in range(2):
        for h in range(2):
            text += f"prmt.b32 t, ${4 + i}, 0, {0x4342 if h else 0x4140:#x}; "
            text += f"lop3.b32 t, t, {FORMS[name].low.mask << stays:#x}, {exponent:#x}, 0xEA; "
            if not bf16:
                text += _whole(stays)
            text += f"fma.rn.{'bf16x2' if bf16 else 'f16x2'} ${2 * i + h}, t, s, a; "
    return text + "}"


@gluon.constexpr_function
def _twice(number):
    """Bits of two float16 that are equal to a positive power of two."""
    return (number.bit_length() + 14 << 10) * 0x00010001


@gluon.constexpr_function
def _whole(stays):
    """In float16: an integer of its bits behind an exponent, 1024 and more."""
    if not stays:
        return f"mov.b32 z, {_twice(1024):#x}; sub.f16x2 t, t, z; "
    less = _twice(1024 >> stays) | 0x80008000
    return f"mov.b32 z, {(15 - stays << 10) * 0x00010001:#x}; mov.b32 u, {less:#x}; fma.rn.f16x2 t, t, z, u; "


@gluon.constexpr_function
def rows_layout(warps):
    """Of words of 32 bytes of 16 rows a warp [BN, 8], as a thread of the operand has them."""
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], _own(warps), [], [16 * warps, 8]
    )


@gluon.constexpr_function
def factors_layout(warps):
    """Of a group's words of scales [1, BN, 1], of which a thread has those of its two rows."""
    own = [[0, 16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 8, 0]], [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]], own, [], [1, 16 * warps, 1]
    )


@gluon.constexpr_function
def columns_layout(rows, warps):
    """Of rows of x of a group [BM, 32], for the operand whose columns they are, which every warp reads."""
    more = [[1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    every = [[0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *more], lanes, every, [], [rows, 32])


@gluon.constexpr_function
def _own(warps):
    return [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]


@gluon.jit
def _packed(scale, added, n, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """Scales of groups n and what is added, float32, as one word of two 16-bit floats."""
    APART: gl.constexpr = place(FORMAT, 1)
    if gl.bfloat16 == DTYPE:
        raised = ((127 + 69 - n % 2 * APART) << 23).to(gl.float32, bitcast=True)
        both = gl.inline_asm_elementwise(BF16_PAIR, PAIR, [scale * raised, added / LOWERED], gl.int32, True, 1)
    else:
        both = gl.inline_asm_elementwise(F16_PAIR, PAIR, [scale, added], gl.int32, True, 1)
    return both


@gluon.jit
def store_factors(memory, raw, n, FORMAT: gl.constexpr, DTYPE: gl.constexpr, CELLS: gl.constexpr):
    """Of `gguf_operand.coming_scales` of 16 rows a warp: words for `scaled`, into memory [8, BN, 1]."""
    scale, added, _, _ = scales_of(raw, n, FORMAT, CELLS)
    both = _packed(scale, added, n, FORMAT, DTYPE)
    memory.store(gl.permute(gl.reshape(both, (memory.shape[1], 8, 1)), (1, 0, 2)))


@gluon.jit
def scaled(bits, factors, GROUP: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """A group's numbers [BN, 32] of words [BN, 8] of bits, by `factors` [8, BN, 1] in shared memory; LOWERED in
    bfloat16."""
    BN: gl.constexpr = bits.shape[0]
    WORDS: gl.constexpr = bits.type.layout
    FACTORS: gl.constexpr = factors_layout(gl.num_warps())
    own = gl.reshape(factors.slice(GROUP, 1, 0).load(FACTORS), (BN,))
    own = gl.convert_layout(own, gl.SliceLayout(1, WORDS), assert_trivial=True)
    own = gl.expand_dims(own, 1) + gl.zeros([BN, 8], gl.int32, WORDS)
    ASM: gl.constexpr = scaled_asm(FORMAT, GROUP, gl.bfloat16 == DTYPE)
    REGISTERS: gl.constexpr = BF16_REGISTERS if gl.bfloat16 == DTYPE else F16_REGISTERS
    a, b, c, d = gl.inline_asm_elementwise(ASM, FOUR_WORDS, [bits, own], REGISTERS, True, 2)
    w = gl.join(gl.join(a, b), gl.join(c, d))
    w = gl.permute(gl.reshape(w, (BN, 4, 2, 2, 2)), (0, 4, 3, 1, 2))
    return gl.convert_layout(gl.reshape(w, (BN, 32)), OPERAND, assert_trivial=True)


@gluon.jit
def columns(x, OPERAND: gl.constexpr):
    """Rows of x of a group [BM, 32] as the other operand [32, BM], in the order of `scaled`."""
    BM: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, (BM, 4, 2, 2, 2)), (2, 3, 1, 4, 0))
    return gl.convert_layout(gl.reshape(x, (32, BM)), OPERAND, assert_trivial=True)
