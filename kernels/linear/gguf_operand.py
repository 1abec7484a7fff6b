# mypy: disable-error-code="no-untyped-def,attr-defined,assignment,union-attr"
"""Blocks of GGUF files as operands of `mma.sync`, in registers: bits become 16-bit floats without an exchange between
threads, as in `quantized_operand`.

A unit is 256 inputs of a row: one block, or eight of 32. Its numbers stand in chunks of 32 bytes, of which four threads
have two words each. A group of 32 inputs is two steps of 16 (index i): of each step a thread gives a row two registers
(index h), with bytes h and h + 2 of a word. Bits are put behind an exponent (0x4300 | u is 128 + u in bfloat16, 0x6400
| u is 1024 + u in float16), and what that adds is taken off a group's sum by the sum of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.linear.quantized_operand import halves_of
from kernels.weight.gguf import FORMATS

Term = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of a unit's numbers. chunks: bytes at which chunks begin, and the distance of their halves of 16 bytes.
    chunk, shift: of each group, which chunk has them, and their place in a byte; width, to: how many they are, and
    where they stand in a number."""

    chunks: tuple[tuple[int, int], ...]
    chunk: tuple[int, ...]
    shift: tuple[int, ...]
    width: int
    to: int = 0

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1 << self.to) * 0x00010001


@dataclass(frozen=True, slots=True)
class Form:
    """A format as units of 256 inputs.

    align: bytes that whatever is read stands on. zero: what a number is more than it stands for. steps: a group's steps
    have a scale each. split: a word has both steps of a group, in its halves of bytes. paired: a thread's two words
    stand together. wide: a byte is a number.
    """

    align: int
    zero: int
    low: Bits
    high: Bits | None = None
    steps: bool = False
    split: bool = False
    paired: bool = False
    wide: bool = False


def _row(start: int, count: int, apart: int = 16, each: int = 32) -> tuple[tuple[int, int], ...]:
    return tuple((start + each * i, apart) for i in range(count))


_PAIRS, _QUARTERS = tuple(j // 2 for j in range(8)), tuple(j // 4 for j in range(8))
_TWO_BITS = tuple(j % 4 * 2 for j in range(8))
_NIBBLES = tuple(j % 2 * 4 for j in range(8))
_WHOLE, _NONE = tuple(range(8)), (0,) * 8

FORMS = {
    "Q4_K": Form(16, 0, Bits(_row(16, 4), _PAIRS, _NIBBLES, 4), paired=True),
    "Q5_K": Form(16, 0, Bits(_row(48, 4), _PAIRS, _NIBBLES, 4), Bits(_row(16, 1), _NONE, _WHOLE, 1, 4), paired=True),
    "Q6_K": Form(
        2,
        32,
        Bits(_row(0, 4), tuple(j // 4 * 2 + j % 2 for j in range(8)), tuple(j % 4 // 2 * 4 for j in range(8)), 4),
        Bits(_row(128, 2), _QUARTERS, _TWO_BITS, 2, 4),
        steps=True,
    ),
    "Q3_K": Form(2, 4, Bits(_row(32, 2), _QUARTERS, _TWO_BITS, 2), Bits(_row(0, 1), _NONE, _WHOLE, 1, 2), steps=True),
    "Q2_K": Form(4, 0, Bits(_row(16, 2), _QUARTERS, _TWO_BITS, 2), steps=True),
    "Q4_0": Form(2, 8, Bits(_row(2, 4, 18, 36), _PAIRS, _NONE, 4), split=True),
    "Q4_1": Form(4, 0, Bits(_row(4, 4, 20, 40), _PAIRS, _NONE, 4), split=True),
    "Q8_0": Form(2, 128, Bits(_row(2, 8, 16, 34), _WHOLE, _NONE, 4), wide=True),
}


@gluon.constexpr_function
def _asm(registers):
    """Each register is an exponent with terms (source, shift to the right, mask) beside it."""
    made = []
    for register, held in enumerate(registers):
        magic, terms = held
        before = f"{magic:#x}"
        for source, shift, mask in terms:
            word = f"${len(registers) + source}"
            if shift:
                made.append(f"{'shr' if shift > 0 else 'shl'}.b32 t, {word}, {abs(shift)};")
                word = "t"
            made.append(f"lop3.b32 ${register}, {word}, {mask:#x}, {before}, 0x6A;")
            before = f"${register}"
    return "{ .reg .b32 t; " + " ".join(made) + " }"


@gluon.constexpr_function
def numbers_asm(name, group, bf16, upper):
    """Of a thread's two words of a chunk, and of one with high bits: registers (i, h) of a group. upper: of a format
    whose numbers are bytes, their upper halves."""
    form = FORMS[name]
    magic = (0x4300 if bf16 else 0x6400) * 0x00010001
    low, high = form.low, form.high
    registers = []
    for i in range(2):
        for h in range(2):
            if form.split:
                terms = [(group % 2, 4 * i + 8 * h, low.mask)]
            else:
                terms = [(i, low.shift[group] + 8 * h, low.mask)]
            if high is not None:
                terms.append((2 + i, high.shift[group] - high.to + 8 * h, high.mask))
            if upper:
                # 16 times a half byte, of which the sign is turned around
                magic = ((0x4500 if bf16 else 0x7400) | 8) * 0x00010001
                terms = [(i, 4 + 8 * h, low.mask)]
            registers.append((magic, terms))
    return _asm(registers)


@gluon.constexpr_function
def chunk_at(name, high, index):
    """The byte of a unit at which a chunk begins."""
    return (FORMS[name].high if high else FORMS[name].low).chunks[index][0]


@gluon.constexpr_function
def chunk_apart(name, high, index):
    """Bytes from a chunk's first half to its second."""
    return (FORMS[name].high if high else FORMS[name].low).chunks[index][1]


@gluon.constexpr_function
def num_chunks(name, high):
    held = FORMS[name].high if high else FORMS[name].low
    return 0 if held is None else len(held.chunks)


@gluon.constexpr_function
def chunk_of(name, high, group):
    """Which chunk has bits of a group."""
    held = FORMS[name].high if high else FORMS[name].low
    return 0 if held is None else held.chunk[group]


@gluon.constexpr_function
def form_of(name):
    return FORMS[name]


@gluon.constexpr_function
def unit_bytes(name):
    """Bytes of a unit."""
    return FORMATS[name].num_bytes * (256 // FORMATS[name].num_values)


@gluon.constexpr_function
def added(name, bf16):
    """What a number's bits stand for beside what it stands for."""
    form = FORMS[name]
    beside = 128 if bf16 else 1024
    return float(form.zero + beside + (16 * beside if form.wide else 0))


@gluon.constexpr_function
def words_layout(name, warps):
    """Of a chunk's words [W, 16, 8], for the operand with 16 outputs of each warp."""
    near, far = ([[0, 0, 1]], [[0, 0, 2], [0, 0, 4]]) if FORMS[name].paired else ([[0, 0, 4]], [[0, 0, 1], [0, 0, 2]])
    rows = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout([*near, [0, 8, 0]], [*far, *rows], _own(warps), [], [warps, 16, 8])


@gluon.constexpr_function
def inputs_layout(name, warps):
    """Of a unit's inputs as words of two [W, 8, 16], for the operand whose columns are groups."""
    if FORMS[name].paired:
        near, far = [[0, 0, 1], [0, 0, 2]], [[0, 0, 4], [0, 0, 8]]
    else:
        near, far = [[0, 0, 1], [0, 0, 8]], [[0, 0, 2], [0, 0, 4]]
    groups = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(near, [*far, *groups], _own(warps), [], [warps, 8, 16])


@gluon.constexpr_function
def header_layout(warps):
    """Of the first four words of a block [W, 16, 4], which four threads read alike."""
    rows = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    near = [[0, 0, 1], [0, 0, 2], [0, 8, 0]]
    return gl.DistributedLinearLayout(near, [[0, 0, 0], [0, 0, 0], *rows], _own(warps), [], [warps, 16, 4])


@gluon.constexpr_function
def _own(warps):
    return [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]


BF16_REGISTERS, F16_REGISTERS = gl.constexpr((gl.bfloat16,) * 4), gl.constexpr((gl.float16,) * 4)
TWO_WORDS = gl.constexpr("=&r,=&r,=&r,=&r,r,r")
FOUR_WORDS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r")
SIX_WORDS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r")
# Of two words of two 16-bit floats: the first of both, the second of both.
APART = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
# Of such words of both steps, (first, second) of step 0 and of step 1, what a mask leaves.
MASKED = gl.constexpr(
    "and.b32 $0, $4, $8; and.b32 $1, $6, $8; and.b32 $2, $5, $9; and.b32 $3, $7, $9;"
)  # fmt: skip


@gluon.jit
def along_warps(LAYOUT: gl.constexpr):
    """0 to W along the first axis of a layout of three."""
    return gl.expand_dims(
        gl.expand_dims(gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1), 2
    )


@gluon.jit
def along_rows(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to COUNT along the second axis."""
    return gl.expand_dims(gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)


@gluon.jit
def along(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to COUNT along the third."""
    return gl.expand_dims(gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0), 1)


@gluon.jit
def _step(first, second, PAIRED: gl.constexpr, OPERAND: gl.constexpr):
    """Registers h = 0 and 1 of a step, which stand where a thread's two words stood, as [W, R, 16]."""
    W: gl.constexpr = first.shape[0]
    R: gl.constexpr = first.shape[1]
    both = gl.join(first, second)
    if PAIRED:
        # [thread, float of a register, h]
        both = gl.permute(gl.reshape(both, (W, R, 4, 2, 2)), (0, 1, 4, 2, 3))
    else:
        both = gl.permute(gl.reshape(both, (W, R, 2, 4, 2)), (0, 1, 4, 3, 2))
    both = gl.reshape(both, (W, R, 16))
    if OPERAND.operand_index == 1:
        both = gl.permute(both, (0, 2, 1))
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.jit
def numbers(low, high, GROUP: gl.constexpr, UPPER: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr,
            OPERAND: gl.constexpr):  # fmt: skip
    """Both steps of a group of 16 outputs, [W, 16, 16] each: of chunks' words low and high."""
    PAIRED: gl.constexpr = form_of(FORMAT).paired
    ASM: gl.constexpr = numbers_asm(FORMAT, GROUP, gl.bfloat16 == DTYPE, UPPER)
    REGISTERS: gl.constexpr = BF16_REGISTERS if gl.bfloat16 == DTYPE else F16_REGISTERS
    if form_of(FORMAT).high is None:
        a, b, c, d = gl.inline_asm_elementwise(ASM, TWO_WORDS, [low], REGISTERS, True, 2)
    else:
        a, b, c, d = gl.inline_asm_elementwise(ASM, FOUR_WORDS, [low, high], REGISTERS, True, 2)
    return _step(a, b, PAIRED, OPERAND), _step(c, d, PAIRED, OPERAND)


@gluon.jit
def paired_inputs(words):
    """Words [W, 8, 16] of two inputs each as two of [W, 8, 8]: of four inputs in order, the first and the third, the
    second and the fourth."""
    W: gl.constexpr = words.shape[0]
    near, far = gl.split(gl.reshape(words, (W, 8, 8, 2)))
    return gl.inline_asm_elementwise(APART, "=&r,=&r,r,r", [near, far], (gl.int32, gl.int32), True, 1)


@gluon.jit
def inputs(even, odd, mask, FORMAT: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Both steps of groups' inputs, [W, 16, 8] each: `paired_inputs` where the mask has ones."""
    PAIRED: gl.constexpr = form_of(FORMAT).paired
    REGISTERS: gl.constexpr = BF16_REGISTERS if gl.bfloat16 == DTYPE else F16_REGISTERS
    a, b, c, d = gl.inline_asm_elementwise(MASKED, SIX_WORDS, [even, odd, mask], REGISTERS, True, 2)
    return _step(a, b, PAIRED, OPERAND), _step(c, d, PAIRED, OPERAND)


@gluon.jit
def chunk(word_ptr, short_ptr, start, HIGH: gl.constexpr, INDEX: gl.constexpr, FORMAT: gl.constexpr,
          LAYOUT: gl.constexpr):  # fmt: skip
    """Words [W, 16, 8] of a chunk of high or of low bits of a unit. start [W, 16, 1]: where units begin, in words of 32
    bits, or of 16 where formats stand on such."""
    at: gl.constexpr = chunk_at(FORMAT, HIGH, INDEX)
    apart: gl.constexpr = chunk_apart(FORMAT, HIGH, INDEX)
    word = along(8, LAYOUT)
    if form_of(FORMAT).align >= 4:
        made = gl.load(word_ptr + start + (at // 4 + word // 4 * (apart // 4) + word % 4))
    else:
        place = short_ptr + start + (at // 2 + word // 4 * (apart // 2) + word % 4 * 2)
        made = (gl.load(place).to(gl.int32) & 0xFFFF) | (gl.load(place + 1).to(gl.int32) << 16)
    return made


@gluon.jit
def coming_scales(word_ptr, short_ptr, half_ptr, header_start, start, n, FORMAT: gl.constexpr):
    """What a unit's scales are made of, on its way. start [W, 16, 1]: where units begin, in 16-bit words, header_start:
    in words of 32 bits, in `header_layout`; n [1, 1, 8]: groups."""
    HEADER: gl.constexpr = header_start.type.layout
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        raw = (gl.load(word_ptr + header_start + along(4, HEADER)),)
    elif FORMAT == "Q6_K":
        raw = (gl.load(short_ptr + start + 96 + n), gl.load(half_ptr + start + 104))
    elif FORMAT == "Q3_K":
        raw = (
            gl.load(short_ptr + start + 48 + n % 4),
            gl.load(short_ptr + start + 52 + n % 2),
            gl.load(half_ptr + start + 54),
        )
    elif FORMAT == "Q2_K":
        raw = (gl.load(short_ptr + start + n), gl.load(half_ptr + start + 40), gl.load(half_ptr + start + 41))
    elif FORMAT == "Q4_1":
        raw = (gl.load(half_ptr + start + 10 * n), gl.load(half_ptr + start + 10 * n + 1))
    elif FORMAT == "Q4_0":
        raw = (gl.load(half_ptr + start + 9 * n),)
    else:
        gl.static_assert(FORMAT == "Q8_0")
        raw = (gl.load(half_ptr + start + 17 * n),)
    return raw


@gluon.jit
def _six_bits(low, high, n):
    """Number n of eight of 6 bits: of the first four in a byte of `low` each, of the others 4 bits in `high`."""
    bits = gl.where(n < 4, low & 0x3F3F3F3F, high & 0x0F0F0F0F | (low >> 2) & 0x30303030)
    return (bits >> (n % 4 * 8) & 63).to(gl.float32)


@gluon.jit
def scales_of(raw, n, FORMAT: gl.constexpr, CELLS: gl.constexpr):
    """Of `coming_scales`: what numbers of a group's steps are multiplied by, and what is added then, [W, 16, 8] float32
    each, in CELLS."""
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        W: gl.constexpr = raw[0].shape[0]
        even, odd = gl.split(gl.reshape(raw[0], (W, 16, 2, 2)))
        both, second = gl.split(even)
        first, third = gl.split(odd)
        first = gl.expand_dims(gl.convert_layout(first, gl.SliceLayout(2, CELLS), assert_trivial=True), 2)
        second = gl.expand_dims(gl.convert_layout(second, gl.SliceLayout(2, CELLS), assert_trivial=True), 2)
        third = gl.expand_dims(gl.convert_layout(third, gl.SliceLayout(2, CELLS), assert_trivial=True), 2)
        both = gl.expand_dims(gl.convert_layout(both, gl.SliceLayout(2, CELLS), assert_trivial=True), 2)
        d, least = halves_of(both, gl.float16)
        near = d.to(gl.float32) * _six_bits(first, third, n)
        near_added = -least.to(gl.float32) * _six_bits(second, third >> 4, n)
        far, far_added = near, near_added
    elif FORMAT == "Q6_K":
        d = raw[1].to(gl.float32)
        two = raw[0].to(gl.int32)
        near = d * ((two << 24) >> 24).to(gl.float32)
        far = d * (two >> 8).to(gl.float32)
        near_added = near * 0.0
        far_added = near_added
    elif FORMAT == "Q3_K":
        d = raw[2].to(gl.float32)
        low = (raw[0].to(gl.int32) & 0xFFFF) >> (n // 4 * 4)
        high = (raw[1].to(gl.int32) & 0xFFFF) >> (n // 2 * 2)
        near = d * ((low & 15 | (high & 3) << 4) - 32).to(gl.float32)
        far = d * ((low >> 8 & 15 | (high >> 8 & 3) << 4) - 32).to(gl.float32)
        near_added = near * 0.0
        far_added = near_added
    elif FORMAT == "Q2_K":
        d, least = raw[1].to(gl.float32), -raw[2].to(gl.float32)
        two = raw[0].to(gl.int32)
        near, near_added = d * (two & 15).to(gl.float32), least * (two >> 4 & 15).to(gl.float32)
        far, far_added = d * (two >> 8 & 15).to(gl.float32), least * (two >> 12 & 15).to(gl.float32)
    else:
        near = raw[0].to(gl.float32)
        near_added = raw[1].to(gl.float32) if FORMAT == "Q4_1" else near * 0.0
        far, far_added = near, near_added
    return near, near_added, far, far_added
