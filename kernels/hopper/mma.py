# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of what stands in a ring: [64, inputs] of x, a warpgroup's, by rows of the weight."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def begin_slice(acc, x_ring, w_ring, ring, at, HALF: gl.constexpr, FIRST: gl.constexpr, GATHER: gl.constexpr,
                ADDS: gl.constexpr = True):  # fmt: skip
    """Begins to add the product of a ring's next slice to acc [64, N], or to put it there: box HALF of x, of two a
    stage, by N rows of w from FIRST on. GATHER: single threads copy the boxes."""
    ring.wait(at)
    if GATHER:
        # their copies are seen by the matrix unit behind a fence
        fence_async_shared()
    w = w_ring.index(at.stage).slice(FIRST, acc.shape[1])
    return warpgroup_mma(x_ring.index(at.stage * 2 + HALF), w.permute((1, 0)), acc, use_acc=ADDS, is_async=True)


@gluon.jit
def end_slice(token, ring, at, STAGES: gl.constexpr):
    """acc with that slice, and where the ring stands then."""
    # another group's products fill the matrix unit while this one waits for its own
    acc = warpgroup_mma_wait(0, deps=[token])
    ring.release(at.stage)
    return acc, at.next(STAGES)


@gluon.jit
def ring_product(
    acc, x_ring, w_ring, ring, at, slices,
    HALF: gl.constexpr, FIRST: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc with so many slices, and where the ring stands then."""
    for _ in range(slices):
        token = begin_slice(acc, x_ring, w_ring, ring, at, HALF, FIRST, GATHER)
        acc, at = end_slice(token, ring, at, STAGES)
    return acc, at


@gluon.jit
def _settle(acc, token, x_scale, w_scale, ring, stage, RUNNING: gl.constexpr):
    """acc [64, N] with a slice's scaled sums, while RUNNING products behind it run, and its registers, which are free.

    The sums stand where they are asked for: behind the start of the next product of the same registers, the compiler
    would copy these first, and ptxas lets no product run meanwhile.
    """
    part = warpgroup_mma_wait(RUNNING, deps=[token])
    ring.release(stage)
    args = [part, (x_scale * w_scale)[:, None], acc]
    acc = gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", args, dtype=gl.float32, is_pure=False, pack=1
    )
    return acc, part


@gluon.jit
def scaled_product(
    x_ring, w_ring, ring, at, slices, xs, ws, xs_group,
    HALF: gl.constexpr, FIRST: gl.constexpr, N: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of 8-bit floats in slices of 128 inputs, [64, N] as in `ring_product`: each slice's sums are scaled and added up
    in float32. xs [64]: where the first slice's scales of x stand, xs_group apart from those of the next; ws: where its
    scale of w stands, that of the next behind it. Gives the sums, and where the ring stands then.

    Four slices take two sets of registers in turn, so that the matrix unit has the next one while one is scaled. ptxas
    lets no product run from one round of a loop into the next beside others.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    acc = gl.zeros((64, N), gl.float32, mma)
    even = gl.zeros((64, N), gl.float32, mma)
    odd = gl.zeros((64, N), gl.float32, mma)
    for _ in range(slices // 4):
        second = at.next(STAGES)
        third = second.next(STAGES)
        fourth = third.next(STAGES)
        first_token = begin_slice(even, x_ring, w_ring, ring, at, HALF, FIRST, GATHER, False)
        x0 = gl.load(xs)
        x1 = gl.load(xs + xs_group)
        x2 = gl.load(xs + 2 * xs_group)
        x3 = gl.load(xs + 3 * xs_group)
        w0 = gl.load(ws)
        w1 = gl.load(ws + 1)
        w2 = gl.load(ws + 2)
        w3 = gl.load(ws + 3)
        second_token = begin_slice(odd, x_ring, w_ring, ring, second, HALF, FIRST, GATHER, False)
        acc, even = _settle(acc, first_token, x0, w0, ring, at.stage, 1)
        third_token = begin_slice(even, x_ring, w_ring, ring, third, HALF, FIRST, GATHER, False)
        acc, odd = _settle(acc, second_token, x1, w1, ring, second.stage, 1)
        fourth_token = begin_slice(odd, x_ring, w_ring, ring, fourth, HALF, FIRST, GATHER, False)
        acc, even = _settle(acc, third_token, x2, w2, ring, third.stage, 1)
        acc, odd = _settle(acc, fourth_token, x3, w3, ring, fourth.stage, 0)
        at = fourth.next(STAGES)
        xs += 4 * xs_group
        ws += 4
    for _ in range(slices % 4):
        token = begin_slice(even, x_ring, w_ring, ring, at, HALF, FIRST, GATHER, False)
        x0 = gl.load(xs)
        w0 = gl.load(ws)
        acc, even = _settle(acc, token, x0, w0, ring, at.stage, 0)
        at = at.next(STAGES)
        xs += xs_group
        ws += 1
    return acc, at


@gluon.jit
def team_product(acc, x_ring, w_ring, ring, at, slices, live, TEAM: gl.constexpr, TEAMS: gl.constexpr,
                 STAGES: gl.constexpr):  # fmt: skip
    """As `ring_product`, box TEAM of x, of TEAMS a stage, by all rows of w: one product begins before the last one is
    done. live: whether there are any slices."""
    for slice_ in range(slices):
        ring.wait(at)
        x = x_ring.index(at.stage * TEAMS + TEAM)
        token = warpgroup_mma(x, w_ring.index(at.stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[token])
        # the product before this one is done: its stage is free
        ring.release(at.before(STAGES), live=slice_ > 0)
        at = at.next(STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    ring.release(at.before(STAGES), live=live)
    return acc, at


@gluon.jit
def weight_product(acc, acc_up, w_ring, stage, x, WIDE: gl.constexpr):
    """acc, and with WIDE of 2 acc_up, with the product of a stage's weights [outputs, inputs] and x [inputs, rows]:
    where rows are few, outputs are the matrix unit's long side."""
    if WIDE == 2:
        token = warpgroup_mma(w_ring.index(2 * stage), x, acc, is_async=True)
        token_up = warpgroup_mma(w_ring.index(2 * stage + 1), x, acc_up, is_async=True)
        acc, acc_up = warpgroup_mma_wait(0, deps=[token, token_up])
    else:
        token = warpgroup_mma(w_ring.index(stage), x, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
    return acc, acc_up
