# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of what stands in a ring: [64, inputs] of x, a warpgroup's, by rows of the weight."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def begin_slice(acc, x_ring, w_ring, ring, at, HALF: gl.constexpr, FIRST: gl.constexpr, GATHER: gl.constexpr):
    """Begins to add the product of a ring's next slice to acc [64, N]: box HALF of x, of two a stage, by N rows of w
    from FIRST on. GATHER: single threads copy the boxes."""
    ring.wait(at)
    if GATHER:
        # their copies are seen by the matrix unit behind a fence
        fence_async_shared()
    w = w_ring.index(at.stage).slice(FIRST, acc.shape[1])
    return warpgroup_mma(x_ring.index(at.stage * 2 + HALF), w.permute((1, 0)), acc, is_async=True)


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
