# mypy: disable-error-code="no-untyped-def,attr-defined"
"""A ring of stages in shared memory: what fills a stage and what reads it wait for each other by two barriers.

A warp that walks from stage to stage holds a `Cursor`; one that counts its turns asks with their number.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.compat import aggregate, load_box

# Aggregates read their annotations as types, so this file does without `from __future__ import annotations`.


@aggregate
class Cursor:
    """Where a warp stands in a ring: the stage, and the parity of the barrier that it waits for there."""

    stage: gl.tensor
    phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, stage, phase):
        self.stage = stage
        self.phase = phase

    @gluon.jit
    def next(self, STAGES: gl.constexpr):
        """The stage behind this one."""
        stage = self.stage + 1
        phase = gl.where(stage == STAGES, self.phase ^ 1, self.phase)
        return Cursor(gl.where(stage == STAGES, 0, stage), phase)

    @gluon.jit
    def before(self, STAGES: gl.constexpr):
        """The number of the stage before this one. Kept in a variable, Triton takes it for a constant of the loop."""
        return gl.where(self.stage == 0, STAGES, self.stage) - 1


@gluon.jit
def cursor(zero):
    """A reader's, at a ring's first stage. A zero that Triton knows would be one for the whole loop to it."""
    return Cursor(zero, zero)


@gluon.jit
def filling_cursor(zero):
    """That of what fills a ring: its stages are free."""
    return Cursor(zero, zero + 1)


@aggregate
class Ring:
    """A ring's barriers. Copies arrive at a stage's `full` one, its readers at its `empty` one."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, full, empty):
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait_empty(self, at):
        """Waits until a stage has been read."""
        mbarrier.wait(self.empty.index(at.stage), at.phase)

    @gluon.jit
    def acquire(self, at, BYTES: gl.constexpr):
        """Waits until a stage has been read. Gives the barrier of the copies into it, which are of BYTES."""
        self.wait_empty(at)
        bar = self.full.index(at.stage)
        mbarrier.expect(bar, BYTES)
        return bar

    @gluon.jit
    def wait(self, at):
        """Waits until a stage is full."""
        mbarrier.wait(self.full.index(at.stage), at.phase)

    @gluon.jit
    def acquire_turn(self, turn, BYTES: gl.constexpr, STAGES: gl.constexpr):
        """As `acquire`, of a warp that counts its turns."""
        mbarrier.wait(self.empty.index(turn % STAGES), ((turn // STAGES) & 1) ^ 1)
        bar = self.full.index(turn % STAGES)
        mbarrier.expect(bar, BYTES)
        return bar

    @gluon.jit
    def wait_turn(self, turn, STAGES: gl.constexpr):
        """As `wait`, of a warp that counts its turns."""
        mbarrier.wait(self.full.index(turn % STAGES), (turn // STAGES) & 1)

    @gluon.jit
    def release(self, stage, live=True):
        """Says that a stage has been read."""
        mbarrier.arrive(self.empty.index(stage), pred=live)


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """One barrier a stage, passed at that many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), count=ARRIVALS)
    return made


@gluon.jit
def ring_of(STAGES: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """A ring whose stages are filled and read at that many arrivals. A fence comes before its use."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=FILLERS)
        mbarrier.init(empty.index(stage), count=READERS)
    return Ring(full, empty)


@gluon.jit
def load_weights(w_desc, bars, w_ring, stage, tile, up_row, slice_, live, BYTES: gl.constexpr, ROWS: gl.constexpr,
                 BLOCKS: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Asks for a slice of BLOCKS boxes of weights, of a tile of so many ROWS; with WIDE of 2, boxes of gate and, up_row
    behind them, of up, in turn. The stage's barrier expects BYTES, which may come from elsewhere too."""
    BK: gl.constexpr = w_ring.shape[2]
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=live)
    for block in gl.static_range(BLOCKS):
        place = (stage * BLOCKS + block) * WIDE
        column = (slice_ * BLOCKS + block) * BK
        load_box(w_desc, [tile * ROWS, column], bar, w_ring.index(place), pred=live)
        if WIDE == 2:
            load_box(w_desc, [up_row + tile * ROWS, column], bar, w_ring.index(place + 1), pred=live)


@gluon.jit
def load_gate_up(w_desc, row, up_row, column, bar, box, live, WIDE: gl.constexpr):
    """Asks for a box of weights: with WIDE of 2, half of it rows of gate and half, up_row behind them, rows of up, so
    that one product gives both."""
    if WIDE == 2:
        N: gl.constexpr = box.shape[0] // 2
        load_box(w_desc, [row, column], bar, box.slice(0, N), pred=live)
        load_box(w_desc, [row + up_row, column], bar, box.slice(N, N), pred=live)
    else:
        load_box(w_desc, [row, column], bar, box, pred=live)
