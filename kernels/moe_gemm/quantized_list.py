# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of a decode step's pairs with matrices of quantized experts on Hopper, in Gluon: the weights stream through
shared memory as they are stored.

A tile is up to ROWS pairs of one expert by HEIGHT rows of its matrix; in front of an activation half of those are rows
of gate, and half the rows of up that belong to them. A few pairs are a tile each. Packed numbers are unpacked in
registers (`kernels.linear.packed_operand`) and take their scale there; 8-bit floats are multiplied as they are, and
sums of 128 inputs are scaled. Programs of the down product ask for their weights while the up product ends.

Where tiles of a pair each are too few to fill the GPU, several programs share a tile's inputs. The last of them to
finish adds up their sums, in the order of the inputs, so the result does not depend on which one that is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hopper.compat import load_pointers, sync
from kernels.hopper.epilogue import activate, limited
from kernels.hopper.ring import barriers, cursor, load_gate_up
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


@gluon.constexpr_function
def pairs_layout(height, rows):
    """Sums [height, rows]: a thread has a row of gate and the row of up that belongs to it."""
    again = [[32, 0]] if height == 128 else []
    more = [[0, 1 << bit] for bit in range(3, rows.bit_length() - 1)]
    registers = [[1, 0], [height // 2, 0], *again, *more]
    lanes = [[2, 0], [4, 0], [8, 0], [16, 0], [0, 1]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 2], [0, 4]], [], [height, rows])


@gluon.jit
def _ask(w_desc, bars, ring, stage, row, up_row, unit, live, GATED: gl.constexpr):
    """Ask for a unit of the weights, two blocks; its barrier expects the unit's x too."""
    HEIGHT: gl.constexpr = ring.shape[1]
    BK: gl.constexpr = ring.shape[2]
    bar = bars.index(stage)
    mbarrier.expect(bar, 2 * HEIGHT * BK, pred=live)
    for block in gl.static_range(2):
        box = ring.index(2 * stage + block)
        load_gate_up(w_desc, row, up_row, (2 * unit + block) * BK, bar, box, live, 2 if GATED else 1)


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
        expert = gl.load(chosen + tile, cache_modifier=".cg")
        there = ((expert >= 0) & (expert < num_experts)).to(gl.int32)
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
def _matrix_row(column, r, outputs, OUT: gl.constexpr, GATED: gl.constexpr):
    """Where row r of a column's tile stands in its expert's matrix: behind the last row, the last one."""
    row = gl.minimum(column * OUT + r % OUT, outputs - 1)
    return row + r // OUT * outputs if GATED else row


@gluon.jit
def _block_scales(xs, at_x, scale_ptr, at_w, block, xs_group, live, BLOCKED: gl.constexpr, GROUPED: gl.constexpr):
    """Of a block: float32 scales of rows of x [ROWS] and of the matrix [HEIGHT]; 1 where all blocks have the same."""
    sx = at_x.to(gl.float32) * 0.0 + 1.0
    if GROUPED:
        sx = gl.load(xs + at_x + block * xs_group, mask=(at_x >= 0) & live, other=0.0)
    sw = at_w.to(gl.float32) * 0.0 + 1.0
    if BLOCKED:
        sw = gl.load(scale_ptr + at_w + block, mask=(at_w >= 0) & live, other=0.0)
    return sx, sw


@gluon.jit
def _combine(acc, partial_ptr, count_ptr, place, split, SPLITS: gl.constexpr):
    """Stores a program's part of tile `place`, whose columns are all the same pair's. Gives whether all others have
    stored theirs, and then the parts' sums, in the order of the inputs.

    partial_ptr has room for SPLITS columns of each tile, count_ptr a zero for each, which is zero again afterwards.
    """
    R: gl.constexpr = acc.shape[0]
    C: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = acc.type.layout
    r = gl.arange(0, R, gl.SliceLayout(1, mma))
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, mma)), 0)
    parts = partial_ptr + place * SPLITS * R + r
    gl.store(gl.expand_dims(parts + split * R, 1) + column, acc, mask=(column == 0) & gl.expand_dims(r >= 0, 1))
    sync()
    last = gl.atomic_add(count_ptr + place, 1, sem="acq_rel") == SPLITS - 1
    if last:
        sums = gl.load(parts, cache_modifier=".cg")
        for other in gl.static_range(1, SPLITS):
            sums += gl.load(parts + other * R, cache_modifier=".cg")
        acc = gl.expand_dims(sums, 1) + gl.zeros((R, C), gl.float32, mma)
        gl.store(count_ptr + place, 0)
    return last, acc


@gluon.jit(do_not_specialize=["xs_row", "xs_group"])
def quantized_list_kernel(
    x, xs, w_desc, scale_ptr, beside_ptr, biases, chosen, offsets, ends, weights, y, partial_ptr, count_ptr,
    num_experts, inputs, outputs, expert_rows, G, scale_rows, xs_row, xs_group, limit,
    TOP: gl.constexpr, HEIGHT: gl.constexpr, ROWS: gl.constexpr, ALONE: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_E: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, FLOAT: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, BESIDE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BLOCKED: gl.constexpr, GROUPED: gl.constexpr,
    ACT: gl.constexpr, LIMITED: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[pair] = act(x[token] · gate) ∘ (x[token] · up), or weight · x[pair] · matrix without ACT, for one column of
    tiles of up to ROWS pairs by HEIGHT rows; an expert has expert_rows rows of the matrix. SPLITS: programs that share
    the inputs of a tile, one unless it is ALONE; then partial_ptr and count_ptr are as in `_combine`.

    PACKED: 4-bit integers, or floats (FLOAT), whose blocks have SCALES scales each; BESIDE: with zero points, or a
    factor a row. Else 8-bit floats with a scale for BLOCK_ROWS rows and 128 inputs (BLOCKED), or one a row, and inputs
    with a scale for 128 (GROUPED), or one a row.
    """
    GATED: gl.constexpr = ACT is not None
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    BK: gl.constexpr = 64 if PACKED else 128
    mma: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
        if PACKED
        else gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 32])
    )
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    bytes_: gl.constexpr = bytes_layout(HEIGHT, WARPS)
    by_scales: gl.constexpr = scales_layout(HEIGHT, SCALES)
    taken: gl.constexpr = inputs_layout(ROWS, WARPS)
    across: gl.constexpr = (
        gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        if PACKED
        else gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    )
    x_memory: gl.constexpr = (
        inputs_memory(ROWS) if PACKED else gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    )
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    paired: gl.constexpr = pairs_layout(HEIGHT, ROWS)

    column, tile = gl.program_id(0), gl.program_id(1)
    begin, stop = 0, (inputs + 255) // 256
    if SPLITS > 1:
        split, units = gl.program_id(2), stop
        begin, stop = split * units // SPLITS, (split + 1) * units // SPLITS
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, HEIGHT, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES * 2, ROWS, 128], x_memory)
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
            _ask(w_desc, bars, ring, place, row, outputs, begin + place, begin + place < stop, GATED)
        i = gl.arange(0, ROWS, gl.SliceLayout(1, across))
        j = gl.arange(0, ROWS, gl.SliceLayout(0, flat))
        m = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
        # Rows past the expert's last pair stand where it does, and are neither read nor stored.
        if ALONE:
            there = there * 0 + 1
            source, pair, held = i * 0 + tile, j * 0 + tile, m * 0 + tile
        else:
            source = gl.load(chosen + start + gl.minimum(i, there - 1), cache_modifier=".cg")
            pair = gl.load(chosen + start + gl.minimum(j, there - 1), cache_modifier=".cg")
            held = gl.load(chosen + start + gl.minimum(m, there - 1), cache_modifier=".cg")
        if GATED:
            source, held = source // TOP, held // TOP
        x_rows = x + gl.expand_dims(source.to(gl.int64) * inputs, 1)
        if not GATED:
            weight = gl.load(weights + pair, cache_modifier=".cg")
        # Where the tile's rows stand in the matrix, for its scales.
        local = _matrix_row(column, gl.arange(0, HEIGHT, gl.SliceLayout(1, mma)), outputs, OUT, GATED)
        q = gl.arange(0, HEIGHT, gl.SliceLayout(1, gl.SliceLayout(2, by_scales)))
        packed_row = expert.to(gl.int64) * expert_rows + _matrix_row(column, q, outputs, OUT, GATED)
        at_w = (expert.to(gl.int64) * scale_rows + local // BLOCK_ROWS) * G
        at_x = held.to(gl.int64) * xs_row
        if PACKED:
            first = group_scales(scale_ptr, packed_row, G, 2 * begin, SCALES, GROUP, by_scales)
            second = group_scales(scale_ptr, packed_row, G, 2 * begin + 1, SCALES, GROUP, by_scales)
        if PDL and not GATED:
            gdc_wait()
        for place in gl.static_range(STAGES):
            _ask_inputs(x_rows, there, bars, x_ring, place, begin + place, inputs, begin + place < stop, across)
        acc = gl.zeros((HEIGHT, ROWS), gl.float32, mma)
        at = cursor(tile * 0)
        for unit in range(begin, stop):
            if PACKED:
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
            else:
                block = 2 * unit
                sx, sw = _block_scales(xs, at_x, scale_ptr, at_w, block, xs_group, True, BLOCKED, GROUPED)
                whole = (block + 1) * 128 < inputs
                sx_two, sw_two = _block_scales(xs, at_x, scale_ptr, at_w, block + 1, xs_group, whole, BLOCKED, GROUPED)
                mbarrier.wait(bars.index(at.stage), at.phase)
                # copies of single threads are seen by the matrix unit behind a fence
                fence_async_shared()
                none = gl.zeros((HEIGHT, ROWS), gl.float32, mma)
                a = x_ring.index(2 * at.stage).permute((1, 0))
                part = warpgroup_mma(ring.index(2 * at.stage), a, none, use_acc=False)
                acc += part * gl.expand_dims(sx, 0) * gl.expand_dims(sw, 1)
                a = x_ring.index(2 * at.stage + 1).permute((1, 0))
                part = warpgroup_mma(ring.index(2 * at.stage + 1), a, none, use_acc=False)
                acc += part * gl.expand_dims(sx_two, 0) * gl.expand_dims(sw_two, 1)
            sync()
            following = unit + STAGES
            _ask(w_desc, bars, ring, at.stage, row, outputs, following, following < stop, GATED)
            _ask_inputs(x_rows, there, bars, x_ring, at.stage, following, inputs, following < stop, across)
            at = at.next(STAGES)
        last = True
        if SPLITS > 1:
            last, acc = _combine(acc, partial_ptr, count_ptr, tile * gl.num_programs(0) + column, split, SPLITS)
        if last:
            if PACKED:
                if FLOAT:
                    acc *= LOWERED
                if FLOAT and BESIDE:
                    acc *= gl.expand_dims(gl.load(beside_ptr + expert.to(gl.int64) * expert_rows + local), 1)
            else:
                if not BLOCKED:
                    acc *= gl.expand_dims(gl.load(scale_ptr + at_w), 1)
                if not GROUPED:
                    acc *= gl.expand_dims(gl.load(xs + at_x), 0)
            out = gl.convert_layout(acc, paired)
            if BIASED:
                b = _matrix_row(column, gl.arange(0, HEIGHT, gl.SliceLayout(1, paired)), outputs, OUT, GATED)
                out += gl.expand_dims(gl.load(biases + expert.to(gl.int64) * expert_rows + b).to(gl.float32), 1)
            if GATED:
                gate, up = gl.split(gl.permute(gl.reshape(out, (2, OUT, ROWS)), (1, 2, 0)))
                if LIMITED:
                    gate, up = limited(gate, up, limit)
                if ACT == "swiglu_oai":
                    out = gate / (1.0 + gl.exp(-1.702 * gate)) * (up + 1.0)
                else:
                    out = activate(gate, ACT) * up
            out = gl.convert_layout(out, flat)
            if not GATED:
                out *= gl.expand_dims(weight, 0)
            n = column * OUT + gl.arange(0, OUT, gl.SliceLayout(1, flat))
            spot = y + gl.expand_dims(pair.to(gl.int64) * outputs, 0) + gl.expand_dims(n, 1)
            live = gl.expand_dims(j < there, 0) & gl.expand_dims(n < outputs, 1)
            gl.store(spot, out.to(y.dtype.element_ty), mask=live)
    elif PDL and not GATED:
        gdc_wait()
