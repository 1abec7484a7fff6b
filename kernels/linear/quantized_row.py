# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The one row of a product of quantized weights, on its way into shared memory: normed, or normed and quantized, by
each program for itself, which takes no launch before the product."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.compat import view
from kernels.linear.quantized_operand import halves_of, times
from kernels.weight.inputs import FP8_MAX
from kernels.weight.inputs import SMALLEST as LEAST

END, SMALLEST = gl.constexpr(FP8_MAX), gl.constexpr(LEAST)
# Columns of the matrix instructions' second operand; inputs of a row that a program looks through at once.
COLUMNS, PIECE = gl.constexpr(8), gl.constexpr(2048)


@gluon.jit
def inverse_norm(low, high, K, eps):
    """1 / √(mean square + eps) of a row of K numbers, given as halves of its words."""
    return gl.rsqrt(gl.sum(low * low + high * high, axis=0) / K + eps)


@gluon.jit
def stage_row(words, g, K, eps, offset, row, DTYPE: gl.constexpr, NORM: gl.constexpr, OFFSET: gl.constexpr):
    """Stores a row's words, with NORM times the norm's weight, whose words are g. Gives what sums are to be multiplied
    by."""
    scale = 1.0
    if NORM:
        low, high = halves_of(words, DTYPE)
        scale = inverse_norm(low.to(gl.float32), high.to(gl.float32), K, eps)
        words = times(words, g, offset, DTYPE, OFFSET)
    row.store(words)
    return scale


@gluon.jit
def scale_of(largest, POWER: gl.constexpr):
    """The scale of inputs of such a largest magnitude; POWER: rounded up to a power of two. See `kernels.quantize`."""
    largest = gl.maximum(largest, SMALLEST)
    scale = gl.div_rn(largest, largest * 0.0 + END)
    if POWER:
        # the exponent alone, one more where there is a fraction
        scale = ((scale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def rounded_fp8(f, scale, inverse):
    """f / scale as 8-bit floats, rounded as by a division: Markstein 1990, theorem 7.1, from a reciprocal that is."""
    near = gl.minimum(gl.maximum(f * inverse, -4 * END), 4 * END)
    ratio = gl.fma(gl.fma(-near, scale, f), inverse, near)
    return gl.minimum(gl.maximum(ratio, -END), END).to(gl.float8e4nv)


@gluon.jit
def stage_quantized_row(
    words, g, K, eps, offset, given_ptr, row, scales,
    DTYPE: gl.constexpr, NORM: gl.constexpr, GROUPED: gl.constexpr, STATIC: gl.constexpr, POWER: gl.constexpr,
):  # fmt: skip
    """Stores a row's words as 8-bit floats, and the scales of 128 inputs (GROUPED). Gives what sums are to be
    multiplied by: the scale of all inputs, or one.

    See `kernels.quantize`. Words behind the row are zero; g are words of the norm's weight.
    """
    WORDS: gl.constexpr = words.shape[0]
    low, high = halves_of(words, DTYPE)
    low, high = low.to(gl.float32), high.to(gl.float32)
    if NORM:
        inverse = inverse_norm(low, high, K, eps)
        g_low, g_high = halves_of(g, DTYPE)
        low = (low * inverse * (g_low.to(gl.float32) + offset)).to(DTYPE).to(gl.float32)
        high = (high * inverse * (g_high.to(gl.float32) + offset)).to(DTYPE).to(gl.float32)
    if GROUPED:
        low, high = gl.reshape(low, (WORDS // 64, 64)), gl.reshape(high, (WORDS // 64, 64))
    if STATIC:
        scale = gl.load(given_ptr)
        if GROUPED:
            scale += gl.max(low, axis=1) * 0.0
    else:
        largest = gl.maximum(gl.abs(low), gl.abs(high))
        scale = scale_of(gl.max(largest, axis=1 if GROUPED else 0), POWER)
    one = scale * 0.0 + 1.0
    if GROUPED:
        scales.store(scale)
        inverse = gl.expand_dims(gl.div_rn(one, scale), 1)
        scale = gl.expand_dims(scale, 1)
    else:
        inverse = gl.div_rn(one, scale)
    numbers = gl.join(rounded_fp8(low, scale, inverse), rounded_fp8(high, scale, inverse))
    row.store(gl.reshape(numbers, (2 * WORDS,)))
    return 1.0 if GROUPED else scale


@gluon.jit
def piece_of(ptr, number: gl.constexpr, K, WHOLE: gl.constexpr):
    """PIECE of K numbers at ptr, zero behind the last."""
    k = number * PIECE + gl.arange(0, PIECE, WHOLE)
    return gl.load(ptr + k, mask=k < K, other=0.0)


@gluon.jit
def stage_blocks(f, scale, boxes, scales):
    """Stores blocks [H, 128] of a row as 8-bit floats into boxes [H // 8, 8, 128], whose blocks are columns of an
    operand, and into scales [H, 8] each block's, in its column; zeros in the others."""
    H: gl.constexpr = f.shape[0]
    COMING: gl.constexpr = f.type.layout
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([H, 128], gl.float8e4nv)
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    by = gl.expand_dims(scale, 1)
    view(boxes, gl.float8e4nv, [H, 128], rows).store(rounded_fp8(f, by, gl.div_rn(by * 0.0 + 1.0, by)))
    place = gl.arange(0, H, gl.SliceLayout(1, COMING))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, COMING))
    by_column = gl.where((place % COLUMNS)[:, None] == column[None, :], by, 0.0)
    view(scales, gl.float32, [H, COLUMNS], matrix).store(by_column)
