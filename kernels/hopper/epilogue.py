# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""What becomes of a tile's sums: split in halves, gated, added up with those of other programs, written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernels.hopper.compat import store_box, sync
from kernels.hopper.schedule import first_unit, unit_owner


@gluon.jit
def halves(acc, N: gl.constexpr):
    """[R, 2N] as its first and its last N columns."""
    R: gl.constexpr = acc.shape[0]
    return gl.split(gl.permute(gl.reshape(acc, (R, 2, N)), (0, 2, 1)))


@gluon.jit
def upper_and_lower(acc, BN: gl.constexpr, BM: gl.constexpr):
    """[2·BN, BM] as its first and its last BN rows."""
    return gl.split(gl.permute(gl.reshape(acc, (2, BN, BM)), (1, 2, 0)))


@gluon.jit
def in_columns(acc, EACH: gl.constexpr):
    """[R, C] in parts of EACH columns, a power of two of them."""
    parts = (acc,)
    for _ in gl.static_range((acc.shape[1] // EACH).bit_length() - 1):
        more = ()
        for i in gl.static_range(len(parts)):
            more = more + halves(parts[i], parts[i].shape[1] // 2)
        parts = more
    return parts


@gluon.jit
def activate(x, KIND: gl.constexpr):
    """KIND of x, float32: "silu" or "gelu_tanh"."""
    if KIND == "silu":
        return x / (1.0 + gl.exp(-x))
    # gelu_tanh; tanh(z) = 2·sigmoid(2z) − 1
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + gl.exp(-2.0 * inner))


@gluon.jit
def limited(gate, up, limit):
    """Both clipped, as some models do before the activation: gate from above, up from both sides."""
    return gl.minimum(gate, limit), gl.minimum(gl.maximum(up, -limit), limit)


@gluon.jit
def emit(y_desc, out, first, row, columns, boxes):
    """Writes tensors of [64, n], each from its column on, through places of shared memory from `first` on. What was
    written before has been read by the copy engine first; what lies outside of y is left out."""
    tma.store_wait(0)
    sync()
    for i in gl.static_range(len(boxes)):
        out.index(first + i).store(boxes[i].to(y_desc.dtype))
    fence_async_shared()
    sync()
    for i in gl.static_range(len(boxes)):
        store_box(y_desc, [row, columns[i]], out.index(first + i))


@gluon.jit
def combine(sums, tile, begin, slices, units, partial_ptr, count_ptr, AT_ONCE: gl.constexpr):
    """Stores a program's part of a tile that others share: one tensor, or two of a shape. Gives whether all others have
    stored theirs, and then the parts' sums, in the order of the inputs, AT_ONCE parts read at once.

    partial_ptr has room for a part of the first and one of the last tile of each program, count_ptr a zero for each
    tile, which is zero again afterwards.
    """
    BN: gl.constexpr = sums[0].shape[0]
    BM: gl.constexpr = sums[0].shape[1]
    CELLS: gl.constexpr = len(sums) * BN * BM
    mma: gl.constexpr = sums[0].type.layout
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    cell = gl.arange(0, BN, gl.SliceLayout(1, mma))[:, None] * BM + gl.arange(0, BM, gl.SliceLayout(0, mma))[None, :]
    opens = (begin == tile * slices).to(gl.int32)
    mine = partial_ptr + (2 * program + opens).to(gl.int64) * CELLS
    for i in gl.static_range(len(sums)):
        gl.store(mine + i * BN * BM + cell, sums[i])
    one = unit_owner(tile * slices, units, programs)
    other = unit_owner((tile + 1) * slices - 1, units, programs)
    sync()
    last = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == other - one
    if last:
        zeros = gl.zeros((BN, BM), gl.float32, mma)
        sums = (zeros,) if len(sums) == 1 else (zeros, zeros)
        for some in range(one, other + 1, AT_ONCE):
            for place in gl.static_range(AT_ONCE):
                sharer = some + place
                opens = (first_unit(sharer, units, programs) <= tile * slices).to(gl.int32)
                theirs = partial_ptr + (2 * sharer + opens).to(gl.int64) * CELLS
                held = (cell >= 0) & (sharer <= other)
                more = ()
                for i in gl.static_range(len(sums)):
                    part = gl.load(theirs + i * BN * BM + cell, mask=held, other=0.0, cache_modifier=".cg")
                    more = more + (sums[i] + part,)  # noqa: RUF005
                sums = more
        gl.store(count_ptr + tile, 0)
    return last, sums


@gluon.jit
def close_tile(
    acc, acc_up, tile, begin, end, slices, units, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, y_stride, residual_stride,
    SHARED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    limit=0.0, LIMITED: gl.constexpr = False,
):  # fmt: skip
    """What follows a tile's sums acc [BN, BM] of units begin to end, of `slices` a tile: sharers' parts, bias,
    activation, residual. acc_up: the up half's sums, with ACT. LIMITED: both are clipped before it."""
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    GATED: gl.constexpr = ACT is not None
    WIDE: gl.constexpr = 2 if GATED else 1
    WARPS: gl.constexpr = gl.num_warps()
    # parts of a shared tile that are read at once: as many as registers hold
    EACH: gl.constexpr = BN * BM * WIDE // (32 * WARPS)
    AT_ONCE: gl.constexpr = 8 if EACH <= 8 else (4 if EACH <= 16 else 1)
    VEC: gl.constexpr = 4 if BN * BM >= WARPS * 128 else 2
    flat: gl.constexpr = gl.BlockedLayout([VEC, 1], [16, 2], [1, WARPS], [0, 1])
    n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, flat))
    m = gl.arange(0, BM, gl.SliceLayout(0, flat))
    live = (n < N)[:, None] & (m < M)[None, :]
    if RESIDUAL:
        spot = residual_ptr + m.to(gl.int64)[None, :] * residual_stride + n[:, None]
        add = gl.load(spot, mask=live, other=0.0)
    last = end - begin == slices
    if SHARED and end - begin < slices:
        sums = (acc, acc_up) if GATED else (acc,)
        last, sums = combine(sums, tile, begin, slices, units, partial_ptr, count_ptr, AT_ONCE)
        acc = sums[0]
        acc_up = sums[WIDE - 1]
    if last:
        y = gl.convert_layout(acc, flat)
        if BIAS:
            y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            up = gl.convert_layout(acc_up, flat)
            if BIAS:
                up += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
            if LIMITED:
                y, up = limited(y, up, limit)
            y = activate(y, ACT) * up
        if RESIDUAL:
            y += add.to(gl.float32)
        gl.store(y_ptr + m.to(gl.int64)[None, :] * y_stride + n[:, None], y.to(y_ptr.dtype.element_ty), mask=live)
