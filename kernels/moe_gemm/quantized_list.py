# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of a decode step's pairs with matrices of experts of packed numbers on Hopper, in Gluon: the weights stream
through shared memory as they are stored.

A tile is up to ROWS pairs of one expert by HEIGHT rows of its matrix; in front of an activation half of those are rows
of gate, and half the rows of up that belong to them. A few pairs are a tile each. Numbers are unpacked in registers
(`kernels.linear.packed_operand`) and take their scale there. Programs of the down product ask for their weights while
the up product ends.

Where tiles of a pair each are too few to fill the GPU, several programs share a tile's inputs. The last of them to
finish adds up their sums, in the order of the inputs, so the result does not depend on which one that is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hopper.compat import load_pointers, sync
from kernels.hopper.ring import barriers, cursor
from kernels.linear.packed_operand import (
    LOWERED,
    bytes_layout,
    group_scales,
    inputs_layout,
    inputs_memory,
    inputs_of,
    scales_layout,
    weights_of,
    zero_points,
)
from kernels.moe_gemm.expert_tiles import (
    ask_unit,
    combine_splits,
    matrix_row,
    pair_expert,
    split_range,
    write_pairs,
    written_layout,
)


@gluon.jit
def _ask_inputs(x_rows, there, bars, x_ring, stage, unit, inputs, live, ACROSS: gl.constexpr):
    """Single threads copy a unit of the first `there` rows of x, zeros behind them and past the last input."""
    if live:
        row = gl.arange(0, x_ring.shape[1], gl.SliceLayout(1, ACROSS))
        for block in gl.static_range(2):
            k = (2 * unit + block) * 128 + gl.arange(0, 128, gl.SliceLayout(0, ACROSS))
            inside = gl.expand_dims(k < inputs, 0) & gl.expand_dims(row < there, 1)
            load_pointers(x_ring.index(2 * stage + block), x_rows + gl.expand_dims(k, 0), mask=inside)
        async_copy.mbarrier_arrive(bars.index(stage), increment_count=False)


@gluon.jit
def _place(chosen, offsets, ends, tile, num_experts, ROWS: gl.constexpr, ALONE: gl.constexpr, BLOCK_E: gl.constexpr):
    """The tile's expert, the place of its first pair, and how many pairs are in it (0 or less: there is no tile)."""
    if ALONE:
        expert, here = pair_expert(chosen, tile, num_experts)
        there = here.to(gl.int32)
        start = tile
    else:
        spread: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_E // (32 * gl.num_warps()))], [32], [gl.num_warps()], [0])
        e = gl.arange(0, BLOCK_E, spread)
        upto = gl.load(ends + e, mask=e < num_experts, other=1 << 30, cache_modifier=".cg")
        passed = upto <= tile
        expert = gl.sum(passed.to(gl.int32), 0)
        at = gl.minimum(expert, num_experts - 1)
        start = gl.load(offsets + at, cache_modifier=".cg")
        start += (tile - gl.max(gl.where(passed, upto, 0), 0)) * ROWS
        there = gl.load(offsets + at + 1, cache_modifier=".cg") - start
        there = gl.where(expert < num_experts, there, 0)
    return expert, start, there


@gluon.jit
def quantized_list_kernel(
    x, w_desc, scale_ptr, beside_ptr, biases, chosen, offsets, ends, weights, y, partial_ptr, count_ptr,
    num_experts, inputs, outputs, expert_rows, G, limit,
    TOP: gl.constexpr, HEIGHT: gl.constexpr, ROWS: gl.constexpr, ALONE: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_E: gl.constexpr, STAGES: gl.constexpr,
    FLOAT: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, BESIDE: gl.constexpr,
    ACT: gl.constexpr, LIMITED: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[pair] = act(x[token] · gate) ∘ (x[token] · up), or weight · x[pair] · matrix without ACT, for one column of
    tiles of up to ROWS pairs by HEIGHT rows; an expert has expert_rows rows of the matrix. SPLITS: programs that share
    the inputs of a tile, one unless it is ALONE; then partial_ptr and count_ptr are as in `combine_splits`.

    4-bit integers, or floats (FLOAT), whose blocks have SCALES scales each; BESIDE: with zero points, or a factor for
    each row.
    """
    GATED: gl.constexpr = ACT is not None
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    bytes_: gl.constexpr = bytes_layout(HEIGHT, WARPS)
    by_scales: gl.constexpr = scales_layout(HEIGHT, SCALES)
    taken: gl.constexpr = inputs_layout(ROWS, WARPS)
    across: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    flat: gl.constexpr = written_layout(WARPS)

    column, tile = gl.program_id(0), gl.program_id(1)
    split, begin, stop = split_range(inputs, 256, SPLITS)
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, HEIGHT, 64], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES * 2, ROWS, 128], inputs_memory(ROWS))
    # one arrival for the weights, and every thread's for its part of x
    bars = barriers(STAGES, 1 + 32 * WARPS)
    fence_async_shared()
    if PDL:
        if GATED:
            gdc_wait()
        # behind the wait: the down product may then read what was chosen before it waits itself
        gdc_launch_dependents()
    expert, start, there = _place(chosen, offsets, ends, tile, num_experts, ROWS, ALONE, BLOCK_E)
    if there > 0:
        row = expert * expert_rows + column * OUT
        for place in gl.static_range(STAGES):
            ask_unit(w_desc, bars, ring, place, row, outputs, begin + place, begin + place < stop, GATED)
        i = gl.arange(0, ROWS, gl.SliceLayout(1, across))
        j = gl.arange(0, ROWS, gl.SliceLayout(0, flat))
        # Rows past the expert's last pair stand where it does, and are neither read nor stored.
        if ALONE:
            there = there * 0 + 1
            source, pair = i * 0 + tile, j * 0 + tile
        else:
            source = gl.load(chosen + start + gl.minimum(i, there - 1), cache_modifier=".cg")
            pair = gl.load(chosen + start + gl.minimum(j, there - 1), cache_modifier=".cg")
        if GATED:
            source = source // TOP
        x_rows = x + gl.expand_dims(source.to(gl.int64) * inputs, 1)
        weight = pair
        if not GATED:
            weight = gl.load(weights + pair, cache_modifier=".cg")
        # Where the tile's rows stand in the matrix, for its scales.
        q = gl.arange(0, HEIGHT, gl.SliceLayout(1, gl.SliceLayout(2, by_scales)))
        packed_row = expert.to(gl.int64) * expert_rows + matrix_row(column, q, outputs, OUT, GATED)
        first = group_scales(scale_ptr, packed_row, G, 2 * begin, SCALES, GROUP, by_scales)
        second = group_scales(scale_ptr, packed_row, G, 2 * begin + 1, SCALES, GROUP, by_scales)
        if PDL and not GATED:
            gdc_wait()
        for place in gl.static_range(STAGES):
            _ask_inputs(x_rows, there, bars, x_ring, place, begin + place, inputs, begin + place < stop, across)
        acc = gl.zeros((HEIGHT, ROWS), gl.float32, mma)
        at = cursor(tile * 0)
        for unit in range(begin, stop):
            block = 2 * unit
            one, two = first, second
            # asked for a unit ahead
            first = group_scales(scale_ptr, packed_row, G, block + 2, SCALES, GROUP, by_scales)
            second = group_scales(scale_ptr, packed_row, G, block + 3, SCALES, GROUP, by_scales)
            zero, zero_two = one, two
            if not FLOAT:
                zero = zero_points(beside_ptr, packed_row, G, block, SCALES, GROUP, BESIDE, by_scales)
                zero_two = zero_points(beside_ptr, packed_row, G, block + 1, SCALES, GROUP, BESIDE, by_scales)
            mbarrier.wait(bars.index(at.stage), at.phase)
            a = inputs_of(x_ring.index(2 * at.stage).load(taken), right)
            w = weights_of(ring.index(2 * at.stage).load(bytes_), one, zero, FLOAT, by_scales, left)
            acc = mma_v2(w, a, acc)
            a = inputs_of(x_ring.index(2 * at.stage + 1).load(taken), right)
            w = weights_of(ring.index(2 * at.stage + 1).load(bytes_), two, zero_two, FLOAT, by_scales, left)
            acc = mma_v2(w, a, acc)
            sync()
            following = unit + STAGES
            ask_unit(w_desc, bars, ring, at.stage, row, outputs, following, following < stop, GATED)
            _ask_inputs(x_rows, there, bars, x_ring, at.stage, following, inputs, following < stop, across)
            at = at.next(STAGES)
        last = True
        if SPLITS > 1:
            last, acc = combine_splits(acc, partial_ptr, count_ptr, tile * gl.num_programs(0) + column, split, SPLITS)
        if last:
            if FLOAT:
                acc *= LOWERED
            if FLOAT and BESIDE:
                local = matrix_row(column, gl.arange(0, HEIGHT, gl.SliceLayout(1, mma)), outputs, OUT, GATED)
                acc *= gl.expand_dims(gl.load(beside_ptr + expert.to(gl.int64) * expert_rows + local), 1)
            write_pairs(
                acc, column, expert, pair, weight, there, biases, y, outputs, expert_rows, limit, ACT, LIMITED, BIASED
            )
    elif PDL and not GATED:
        gdc_wait()
