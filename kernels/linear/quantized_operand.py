# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Words of packed 4-bit integers, 8-bit and 16-bit floats as operands of `mma.sync`, in registers: a thread's words
become its part of an operand without an exchange between threads. Which inputs meet in an instruction does not matter
to their sum, as long as both sides are taken in the same order.

A 4-bit integer u becomes a 16-bit float by its bits alone: 0x4300 | u is 128 + u in bfloat16, 0x6400 | u is 1024 + u in
float16 (Kim et al. 2022, arXiv:2211.10017). 8-bit floats become float16, which holds them exactly.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _nibbles(magic: int) -> str:
    """Of two words: each register gets integers s and s + 4 of one."""
    made = []
    for word in range(2):
        for s in range(4):
            source = f"${8 + word}" if s == 0 else "t"
            if s:
                made.append(f"shr.u32 t, ${8 + word}, {4 * s};")
            made.append(f"lop3.b32 ${4 * word + s}, {source}, 0x000F000F, {magic:#x}, 0xEA;")
    return "{ .reg .b32 t; " + " ".join(made) + " }"


KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
BF16_NIBBLES, F16_NIBBLES = gl.constexpr(_nibbles(0x43004300)), gl.constexpr(_nibbles(0x64006400))
NIBBLE_REGISTERS, FLOAT_REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r"), gl.constexpr("=r,=r,=r,=r,r,r")
BF16_PARTS, F16_PARTS = gl.constexpr((gl.bfloat16,) * 8), gl.constexpr((gl.float16,) * 8)
# Of two words of four 8-bit floats: two in a register.
FLOATS = gl.constexpr("""
{
.reg .b16 a, b, c, d;
mov.b32 {a, b}, $4;
mov.b32 {c, d}, $5;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}
""")
# Of four words of two 16-bit floats, eight inputs: inputs s and s + 4 in a register.
PAIRS = gl.constexpr("""
{
prmt.b32 $0, $4, $6, 0x5410;
prmt.b32 $1, $5, $7, 0x5410;
prmt.b32 $2, $4, $6, 0x7632;
prmt.b32 $3, $5, $7, 0x7632;
}
""")
PAIR_REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r")
HALVES = gl.constexpr("mov.b32 {$0, $1}, $2;")
# x · g + (−0): there are GPUs that have no product of two bfloat16.
BF16_TIMES = gl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
F16_TIMES = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")


@gluon.jit
def integers(words, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Words [W, BN, 16] of 128 integers as an operand [W, BN, 128]: 128 or 1024 more than each."""
    W: gl.constexpr = words.shape[0]
    BN: gl.constexpr = words.shape[1]
    if gl.bfloat16 == DTYPE:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(BF16_NIBBLES, NIBBLE_REGISTERS, [words], BF16_PARTS, True, 2)
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(F16_NIBBLES, NIBBLE_REGISTERS, [words], F16_PARTS, True, 2)
    first = gl.join(gl.join(a, e), gl.join(c, g))
    second = gl.join(gl.join(b, f), gl.join(d, h))
    # [quarter, pair of words, s + 4, word of a pair, s // 2, s % 2]
    w = gl.reshape(gl.join(first, second), (W, BN, 4, 2, 2, 2, 2, 2))
    w = gl.reshape(gl.permute(w, (0, 1, 3, 5, 6, 7, 2, 4)), (W, BN, 128))
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def floats(words):
    """Words [W, R, 32] of 128 8-bit floats as float16, in the order of an operand [W, R, 128]."""
    W: gl.constexpr = words.shape[0]
    R: gl.constexpr = words.shape[1]
    a, b, c, d = gl.inline_asm_elementwise(
        FLOATS, FLOAT_REGISTERS, [words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2
    )
    # [half, quarter, pair of words, number % 2, word of a pair, number // 2]
    w = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (W, R, 2, 4, 2, 2, 2, 2))
    return gl.reshape(gl.permute(w, (0, 1, 2, 4, 6, 7, 3, 5)), (W, R, 128))


@gluon.jit
def pairs(words, DTYPE: gl.constexpr):
    """Words [W, BM, 64] of 128 16-bit floats, in the order of `integers`."""
    W: gl.constexpr = words.shape[0]
    BM: gl.constexpr = words.shape[1]
    if gl.bfloat16 == DTYPE:
        even, odd = gl.inline_asm_elementwise(PAIRS, PAIR_REGISTERS, [words], (gl.bfloat16, gl.bfloat16), True, 4)
    else:
        even, odd = gl.inline_asm_elementwise(PAIRS, PAIR_REGISTERS, [words], (gl.float16, gl.float16), True, 4)
    # [quarter, word of integers, s // 2, s + 4, s % 2]
    x = gl.reshape(gl.join(even, odd), (W, BM, 4, 4, 2, 2, 2))
    return gl.reshape(gl.permute(x, (0, 1, 3, 4, 6, 2, 5)), (W, BM, 128))


@gluon.jit
def halves_of(words, DTYPE: gl.constexpr):
    """Of words of two 16-bit floats, the first and the second."""
    if gl.bfloat16 == DTYPE:
        low, high = gl.inline_asm_elementwise(HALVES, "=h,=h,r", [words], (gl.bfloat16, gl.bfloat16), True, 1)
    else:
        low, high = gl.inline_asm_elementwise(HALVES, "=h,=h,r", [words], (gl.float16, gl.float16), True, 1)
    return low, high


@gluon.jit
def times(words, g, offset, DTYPE: gl.constexpr, OFFSET: gl.constexpr):
    """x · (g + offset) of words of two, rounded once."""
    if OFFSET:
        low, high = halves_of(words, DTYPE)
        g_low, g_high = halves_of(g, DTYPE)
        low = (low.to(gl.float32) * (g_low.to(gl.float32) + offset)).to(DTYPE)
        high = (high.to(gl.float32) * (g_high.to(gl.float32) + offset)).to(DTYPE)
        y = gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], gl.int32, True, 1)
    elif gl.bfloat16 == DTYPE:
        y = gl.inline_asm_elementwise(BF16_TIMES, "=r,r,r", [words, g], gl.int32, True, 1)
    else:
        y = gl.inline_asm_elementwise(F16_TIMES, "=r,r,r", [words, g], gl.int32, True, 1)
    return y
