# mypy: disable-error-code="no-untyped-def,attr-defined"
"""What becomes of a tile's sums in `grouped`: a group of warps keeps them in registers until it multiplies the next
one, and writes them meanwhile, in two parts. ACT: the sums are 64 channels of gate and 64 of up, in turn."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.epilogue import emit, halves, limited


@gluon.jit
def _activate(x, KIND: gl.constexpr):
    """`hopper.epilogue.activate` in half of the instructions; what they differ by is lost when h is rounded."""
    z = x
    if KIND != "silu":
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    sigmoid = gl.inline_asm_elementwise(
        """{
        .reg .f32 a;
        mul.f32 a, $1, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 a, a;
        add.f32 a, a, 0f3F800000;
        rcp.approx.ftz.f32 $0, a;
        }""",
        "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return x * sigmoid


@gluon.jit
def _gated(acc, limit, ACT: gl.constexpr, LIMITED: gl.constexpr):
    """act(gate) ∘ up of [64, 128]: 64 columns of gate, 64 of up."""
    gate, up = halves(acc, 64)
    if LIMITED:
        gate, up = limited(gate, up, limit)
    return _activate(gate, ACT) * up


@gluon.jit
def rounded(y_desc, acc, limit, ACT: gl.constexpr, LIMITED: gl.constexpr):
    """[64, 128] as the boxes that are written of it: one, or two without ACT."""
    if ACT is not None:
        return (_gated(acc, limit, ACT, LIMITED).to(y_desc.dtype),)
    else:
        left, right = halves(acc, 64)
        return left.to(y_desc.dtype), right.to(y_desc.dtype)


@gluon.jit
def kept_of(y_desc, left, right, limit, ACT: gl.constexpr, LIMITED: gl.constexpr):
    """What is kept of a tile: boxes, and with ACT the second half as sums, whose activation waits too. Registers would
    not hold the first half as well."""
    if ACT is not None:
        return rounded(y_desc, left, limit, ACT, LIMITED) + (right,)  # noqa: RUF005
    else:
        return rounded(y_desc, left, limit, ACT, LIMITED) + rounded(y_desc, right, limit, ACT, LIMITED)


@gluon.jit
def first_part(y_desc, out, row, column, kept, limit, ACT: gl.constexpr, LIMITED: gl.constexpr, TEAM: gl.constexpr):
    """Half of the work: with ACT the activation that waited, else the boxes from `column` on. Gives what remains to be
    written."""
    if ACT is not None:
        return kept[0], rounded(y_desc, kept[1], limit, ACT, LIMITED)[0]
    else:
        emit(y_desc, out, 2 * TEAM, row, (column, column + 64), (kept[0], kept[1]))
        return kept[2], kept[3]


@gluon.jit
def last_part(y_desc, out, row, column, other, remaining, ACT: gl.constexpr, TEAM: gl.constexpr):
    """The other half: with ACT the boxes from `column` and from `other` on, else both from `other` on."""
    if ACT is not None:
        emit(y_desc, out, 2 * TEAM, row, (column, other), remaining)
    else:
        emit(y_desc, out, 2 * TEAM, row, (other, other + 64), remaining)
