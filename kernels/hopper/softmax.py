# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), a tile of keys at a time, in powers of two."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def row_weights(s, m, l, first, position, scale, softcap, BLOCK_N: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
                IS_MASKED: gl.constexpr):  # fmt: skip
    """Weights of scores s [queries, BLOCK_N] of the keys from `first` on, new m and l, and what sums so far shrink
    by."""
    if HAS_SOFTCAP:
        # c·tanh(z) = c·(1 − 2 / (1 + e^2z))
        s = softcap * LOG2E * (1.0 - 2.0 / (1.0 + gl.exp2(2.0 * LOG2E * scale / softcap * s)))
        factor = 1.0
    else:
        factor = scale * LOG2E
    if IS_MASKED:
        key = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        s = gl.where(key[None, :] <= position[:, None], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, axis=1) * factor)
    if IS_MASKED:
        shift = gl.where(top == float("-inf"), 0.0, top)
    else:
        shift = top
    weight = gl.exp2(s * factor - shift[:, None])
    shrink = gl.exp2(m - shift)
    return weight, top, l * shrink + gl.sum(weight, axis=1), shrink


@gluon.jit
def column_weights(s, best, total, IS_SEEN: gl.constexpr):
    """Weights of scores s [keys, queries], −inf where a key is not seen, the new best scores and sums, and what sums so
    far shrink by. total [keys, queries]: keys are added up behind the last tile. IS_SEEN: every tile has a key that is
    seen."""
    top = gl.maximum(best, gl.max(s, axis=0))
    shift = top
    if not IS_SEEN:
        shift = gl.where(top == float("-inf"), 0.0, top)
    w = gl.exp2(s - shift[None, :])
    fade = gl.exp2(best - shift)
    return w, top, total * fade[None, :] + w, fade


@gluon.jit
def clear(values, seen, layout: gl.constexpr):
    """Zeros in the rows of a tile [keys, channels] of shared memory that are not seen: what stands past the context may
    be anything, and a weight of zero does not clear all of it. A fence comes before the matrix unit reads it."""
    values.store(gl.where(seen[:, None], values.load(layout), 0.0).to(values.dtype))
