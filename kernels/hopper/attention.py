# mypy: disable-error-code="no-untyped-def,attr-defined"
"""FlashAttention-3's mainloop (Shah et al. 2024, arXiv:2407.08608): of a tile of queries over all keys that they see.

A tile of keys is multiplied while the softmax of the one before is worked out. One warp brings keys and values, tile by
tile from the last one on; a stage of keys is free again when its scores are there, one of values a turn later.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.compat import aggregate
from kernels.hopper.softmax import row_weights

# Aggregates read their annotations as types, so this file does without `from __future__ import annotations`.

# Rows that a group of four warps multiplies, and such groups.
ROWS = gl.constexpr(64)
GROUPS = gl.constexpr(2)


@aggregate
class KeyBarriers:
    """Of rings of keys and values: a stage's keys and its values are there, and its keys have been multiplied, and the
    values of the turn before."""

    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k_full, v_full, done):
        self.k_full = k_full
        self.v_full = v_full
        self.done = done

    @gluon.jit
    def acquire(self, turn, bar, BYTES: gl.constexpr, STAGES: gl.constexpr):
        """Waits until a turn's keys can be brought, or the values of the turn before it, whose barrier expects BYTES
        then: keys take the place of those of STAGES turns before, whose values go with the turn that follows it."""
        mbarrier.wait(self.done.index(turn % STAGES), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)


@gluon.jit
def key_barriers(STAGES: gl.constexpr):
    """A fence comes before their use."""
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(done.index(stage), count=GROUPS)
    return KeyBarriers(k_full, v_full, done)


@gluon.jit
def begin_scores(qs, rings, bars, turn, layout: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Begins the product of queries and the keys of a turn: of parts of their channels, each with a ring of keys."""
    stage = turn % STAGES
    mbarrier.wait(bars.k_full.index(stage), (turn // STAGES) & 1)
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    for i in gl.static_range(len(qs)):
        s = warpgroup_mma(qs[i], rings[i].index(stage).permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _fold(
    s, acc, m, l, weight, turn, v_ring, bars, first, position, scale, softcap,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """Turns the scores s of a turn, whose product has begun, into weights, while those of the turn before are
    multiplied with its values.

    Weights are carried in float32: as halves they would take as many registers, and instructions to take apart.
    """
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    stage = turn % STAGES
    before = (turn - 1) % STAGES
    mbarrier.wait(bars.v_full.index(before), ((turn - 1) // STAGES) & 1)
    p = gl.convert_layout(weight.to(v_ring.dtype), p_layout)
    acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    weight, m, l, shrink = row_weights(s, m, l, first, position, scale, softcap, BLOCK_N, HAS_SOFTCAP, IS_MASKED)
    # Passed at once, since it was waited for above: a border that keeps the exponentials before the products' end.
    mbarrier.wait(bars.v_full.index(before), ((turn - 1) // STAGES) & 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars.done.index(stage), count=1)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))
    acc = acc * shrink[:, None]
    return acc, m, l, weight


@gluon.jit
def weigh_last(
    qs, rings, bars, turn, m, l, first, position, scale, softcap, layout: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """What queries begin with: the weights of their last tile of keys, from `first` on, and new m and l."""
    s = begin_scores(qs, rings, bars, turn, layout, BLOCK_N, STAGES)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(bars.done.index(turn % STAGES), count=1)
    weight, m, l, _shrink = row_weights(s, m, l, first, position, scale, softcap, BLOCK_N, HAS_SOFTCAP, True)
    return weight, m, l


@gluon.jit
def attend_keys(
    turn, acc, m, l, weight, qs, rings, v_ring, bars, tiles, plain, position, scale, softcap, layout: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Of queries whose last tile of keys has become `weight`: their output acc [ROWS, channels] and its sums l over all
    `tiles`, of which the first `plain` are seen whole, and the next turn."""
    first = (tiles - 1) * BLOCK_N
    for back in range(tiles - 1 - plain):
        s = begin_scores(qs, rings, bars, turn, layout, BLOCK_N, STAGES)
        acc, m, l, weight = _fold(
            s, acc, m, l, weight, turn, v_ring, bars, first - (back + 1) * BLOCK_N, position, scale, softcap,
            BLOCK_N, STAGES, HAS_SOFTCAP, True,
        )  # fmt: skip
        turn += 1
    for _ in range(plain):
        s = begin_scores(qs, rings, bars, turn, layout, BLOCK_N, STAGES)
        acc, m, l, weight = _fold(
            s, acc, m, l, weight, turn, v_ring, bars, 0, position, scale, softcap,
            BLOCK_N, STAGES, HAS_SOFTCAP, False,
        )  # fmt: skip
        turn += 1
    return acc, l, weight, turn


@gluon.jit
def end_values(acc, weight, v_ring, bars, turn, STAGES: gl.constexpr):
    """acc with the values of the turn before, the last of a tile of queries."""
    before = (turn - 1) % STAGES
    mbarrier.wait(bars.v_full.index(before), ((turn - 1) // STAGES) & 1)
    p = gl.convert_layout(weight.to(v_ring.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])
