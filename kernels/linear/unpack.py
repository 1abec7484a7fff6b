# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Writes the numbers of a packed weight out, for dense products of many rows.

4-bit integers whose scales have the numbers' own 16-bit dtype go by words: a thread reads eight of them and writes 16
bytes, in two instructions a pair behind those that pick its bits. An integer u becomes a 16-bit float by its bits alone
(Kim et al. 2022, arXiv:2211.10017): 0x4300 | u is 128 + u in bfloat16, 0x6400 | u is 1024 + u in float16. The
difference to the zero point is exact, and its product with the scale is rounded once, as that of float32 would be.
Everything else takes a Triton kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.packed_rows import WIDTH, constants, held, numbers
from kernels.linear.skinny import INTERPRETED
from kernels.sizes import cdiv
from kernels.weight import Fp4, PackedInt
from kernels.workspace import Workspace

# Integers of a word of 32 bits.
WORD = 8
# Rows of a program, one a warp, and words of a row that each of its threads takes, 32 apart.
ROWS, TURNS = 8, 4

_PAIRS = """
{
.reg .b32 high, one, none, p0, p1, p2, p3;
mov.b32 one, ONE;
mov.b32 none, 0x80008000;
shr.b32 high, $4, 4;
prmt.b32 p0, $4, high, 0x4400;
prmt.b32 p1, $4, high, 0x5511;
prmt.b32 p2, $4, high, 0x6622;
prmt.b32 p3, $4, high, 0x7733;
lop3.b32 p0, p0, 0x000F000F, MAGIC, 0xEA;
lop3.b32 p1, p1, 0x000F000F, MAGIC, 0xEA;
lop3.b32 p2, p2, 0x000F000F, MAGIC, 0xEA;
lop3.b32 p3, p3, 0x000F000F, MAGIC, 0xEA;
fma.rn.KIND p0, p0, one, $6;
fma.rn.KIND p1, p1, one, $6;
fma.rn.KIND p2, p2, one, $6;
fma.rn.KIND p3, p3, one, $6;
fma.rn.KIND $0, p0, $5, none;
fma.rn.KIND $1, p1, $5, none;
fma.rn.KIND $2, p2, $5, none;
fma.rn.KIND $3, p3, $5, none;
}
"""


def _asm(kind: str, magic: int, one: int) -> gl.constexpr:
    twice = {"MAGIC": magic, "ONE": one}
    text = _PAIRS.replace("KIND", kind)
    for name, half in twice.items():
        text = text.replace(name, hex(half << 16 | half))
    return gl.constexpr(text)


BF16_PAIRS, F16_PAIRS = _asm("bf16x2", 0x4300, 0x3F80), _asm("f16x2", 0x6400, 0x3C00)


@gluon.jit
def _twice(half):
    """A 16-bit float as both halves of a word."""
    bits = half.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def unpack_words_kernel(
    data_ptr, scale_ptr, zero_ptr, w_ptr, N, words, G, GROUP: gl.constexpr, ZERO: gl.constexpr, ROWS: gl.constexpr,
    TURNS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Words of [N, words] int32 as four words each of w [N, 4 · words] int32. GROUP words share a scale; 0: a row."""
    read: gl.constexpr = gl.BlockedLayout([1, TURNS, 1], [1, 1, 32], [ROWS, 1, 1], [2, 1, 0])
    made: gl.constexpr = gl.BlockedLayout([1, TURNS, 4], [1, 1, 32], [ROWS, 1, 1], [2, 1, 0])
    rows_in: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, read))
    turns_in: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, read))
    lanes_in: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, read))
    DTYPE: gl.constexpr = scale_ptr.dtype.element_ty
    BF16: gl.constexpr = gl.bfloat16 == DTYPE
    if PDL:
        gdc_launch_dependents()
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, rows_in)[:, None, None]
    at = gl.program_id(1) * (TURNS * 32) + gl.arange(0, TURNS, turns_in)[None, :, None] * 32
    at = at + gl.arange(0, 32, lanes_in)[None, None, :]
    live = (row < N) & (at < words)
    packed = gl.load(data_ptr + row.to(gl.int64) * words + at, mask=live, other=0)
    own = row.to(gl.int64) * G + (at // GROUP if GROUP > 0 else at * 0)
    scale = gl.load(scale_ptr + own, mask=live, other=0.0)
    base: gl.constexpr = 128.0 if BF16 else 1024.0
    if ZERO:
        least = 0.0 - (gl.load(zero_ptr + own, mask=live, other=0).to(gl.float32) + base)
    else:
        least = gl.zeros_like(scale).to(gl.float32) - (base + 8.0)
    asm: gl.constexpr = BF16_PAIRS if BF16 else F16_PAIRS
    one, two, three, four = gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r,r,r", [packed, _twice(scale), _twice(least.to(DTYPE))],
        (gl.int32, gl.int32, gl.int32, gl.int32), True, 1,
    )  # fmt: skip
    pairs = gl.join(gl.join(one, three), gl.join(two, four))
    w = gl.convert_layout(gl.reshape(pairs, (ROWS, TURNS, 128)), made, assert_trivial=True)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, made)))[:, None, None]
    turn = gl.arange(0, TURNS, gl.SliceLayout(0, gl.SliceLayout(2, made)))[None, :, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, made)))[None, None, :]
    column = (gl.program_id(1) * TURNS + turn) * 128 + column
    if PDL:
        # What is written may stand where a kernel before still reads.
        gdc_wait()
    gl.store(w_ptr + row.to(gl.int64) * (words * 4) + column, w, mask=(row < N) & (column < words * 4))


@triton.jit
def unpack_kernel(
    data_ptr, scale_ptr, zero_ptr, w_ptr, N, K, B, G, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    FLOAT: tl.constexpr, EXACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """w [N, K]: a tile of the numbers, in the order that they are stored in. The weight is nobody's output: nothing is
    waited for before it is read."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.program_id(1) * BK
    live = n < N
    k = at + tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
    one, two, left = numbers(
        data_ptr, scale_ptr, zero_ptr, at, n, live, B, G, BITS, GROUP, ZERO, FLOAT, BN, BK,
        w_ptr.dtype.element_ty if FLOAT else tl.float32, EXACT,
    )  # fmt: skip
    q = tl.reshape(tl.join(one, two), (BN, BK)) if FLOAT else one
    w = (q * left[:, None]).to(w_ptr.dtype.element_ty)
    if PDL:
        # What is written may stand where a kernel before still reads.
        gdc_wait()
    tl.store(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], w, mask=live[:, None] & (k < K)[None, :])


def unpacked(workspace: Workspace, weight: PackedInt | Fp4, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [N, K] of a matrix in `dtype`, in the order that they are stored in."""
    n, k = weight.shape
    w = torch.empty(n, k, dtype=dtype, device=weight.data.device)
    if by_words(weight, dtype):
        _unpack_words(workspace, weight, w)
        return w
    workspace.launch(unpack_kernel, (cdiv(n, 64), cdiv(k, WIDTH)))(
        *held(weight)[:3], w, n, k, weight.data.shape[-1], weight.scale.shape[-1],
        **{name: value for name, value in constants(weight).items() if name != "ORDER"}, BN=64, BK=WIDTH,
        EXACT=INTERPRETED or dtype == torch.float32,
        PDL=workspace.pdl, launch_pdl=workspace.pdl, num_warps=4,
    )  # fmt: skip
    return w


def by_words(weight: PackedInt | Fp4, dtype: torch.dtype) -> bool:
    """Whether 4-bit integers have scales in `dtype`, of 16 bits, for whole words of a row of whole words."""
    return (
        not INTERPRETED
        and isinstance(weight, PackedInt)
        and weight.bits == 4
        and weight.scale.dtype == dtype
        and dtype != torch.float32
        and weight.inputs % WORD == 0
        and (weight.group % WORD == 0 or weight.group >= weight.inputs)
        and weight.data.shape[-1] * 2 == weight.inputs
        and weight.data.data_ptr() % 4 == 0
    )


def _unpack_words(workspace: Workspace, weight: PackedInt | Fp4, w: torch.Tensor) -> None:
    data, scale, zero, _ = held(weight)
    assert data is not None
    n, k = w.shape
    words = k // WORD
    workspace.launch(unpack_words_kernel, (cdiv(n, ROWS), cdiv(words, 32 * TURNS)))(
        data.view(torch.int32), scale, zero, w.view(torch.int32), n, words, weight.scale.shape[-1],
        GROUP=0 if weight.group >= k else weight.group // WORD, ZERO=zero is not None, ROWS=ROWS, TURNS=TURNS,
        PDL=workspace.pdl, num_warps=ROWS, launch_pdl=workspace.pdl,
    )  # fmt: skip
