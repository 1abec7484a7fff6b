# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of a decode step's pairs with matrices of quantized experts on Hopper, in Gluon: the weights stream through
shared memory as they are stored.

A tile is up to ROWS pairs of one expert by 64 rows of its matrix; in front of an activation those are 32 rows of gate
and the 32 of up that belong to them. A few pairs are a tile each. Packed numbers are unpacked in registers
(`kernels.linear.quantized_stream`) and take their scale there; 8-bit floats are multiplied as they are, and sums of 128
inputs are scaled. Programs of the down product ask for their weights while the up product ends.

Where tiles of a pair each are too few to fill the GPU, several programs share a tile's inputs. The last of them to
finish adds up their sums, in the order of the inputs, so the result does not depend on which one that is.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_pointers, sync
from kernels.hopper.epilogue import activate, limited
from kernels.hopper.ring import barriers, cursor, load_gate_up
from kernels.linear.packed_operand import (
    BY_1_SCALES,
    BY_2_SCALES,
    BY_4_SCALES,
    BY_8_SCALES,
    group_scales,
    weights_of,
    zero_points,
)
from kernels.linear.quantized_stream import inputs_of
from kernels.moe_gemm.order import ordered
from kernels.moe_gemm.tiles import combined
from kernels.quantize.kernel import quantized
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Fp4, Fp8, Int8, PackedInt
from kernels.workspace import Workspace

# Rows of a matrix that a tile has, inputs of a block and of a stage of the ring.
HEIGHT, WIDTH, UNIT = 64, 128, 256
# Pairs up to which each is a tile, and pairs a tile else.
ALONE_PAIRS, ROWS = 32, 16
# Where tiles of a pair each are shared: programs of a multiprocessor and of a tile, at most; units of a program, at
# least.
PROGRAMS, MAX_SPLITS, UNITS = 4, 4, 4
# Counters of arrivals: more than there are tiles of so few pairs.
_ARRIVALS = 1 << 16

# Int8 is for other kernels.
Quantized = Fp4 | Fp8 | Int8 | PackedInt


@gluon.jit
def _ask(w_desc, bars, ring, stage, row, up_row, unit, live, GATED: gl.constexpr, BK: gl.constexpr):
    """Ask for a unit of the weights, two blocks; its barrier expects the unit's x too."""
    bar = bars.index(stage)
    mbarrier.expect(bar, 2 * 64 * BK, pred=live)
    for block in gl.static_range(2):
        box = ring.index(2 * stage + block)
        load_gate_up(w_desc, row, up_row, (2 * unit + block) * BK, bar, box, live, 2 if GATED else 1)


@gluon.jit
def _ask_inputs(x_rows, bars, x_ring, stage, unit, inputs, live, ACROSS: gl.constexpr):
    """Single threads copy a unit of x, zeros past the last input."""
    if live:
        row = gl.arange(0, x_ring.shape[1], gl.SliceLayout(1, ACROSS))
        for block in gl.static_range(2):
            k = (2 * unit + block) * 128 + gl.arange(0, 128, gl.SliceLayout(0, ACROSS))
            inside = gl.expand_dims(k < inputs, 0) & gl.expand_dims(row >= 0, 1)
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
def _block_scales(xs, at_x, scale_ptr, at_w, block, xs_group, live, BLOCKED: gl.constexpr, GROUPED: gl.constexpr):
    """Of a block: scales of rows of x [ROWS] and of the matrix [64], float32; 1 where there is one for all blocks."""
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
    TOP: gl.constexpr, ROWS: gl.constexpr, ALONE: gl.constexpr, SPLITS: gl.constexpr, BLOCK_E: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr, FLOAT: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, BESIDE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BLOCKED: gl.constexpr, GROUPED: gl.constexpr,
    ACT: gl.constexpr, LIMITED: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[pair] = act(x[token] · gate) ∘ (x[token] · up), or weight · x[pair] · matrix without ACT, for one column of
    tiles; an expert has expert_rows rows of the matrix. SPLITS: programs that share the inputs of a tile, one unless
    it is ALONE; then partial_ptr and count_ptr are as in `_combine`.

    PACKED: 4-bit integers, or floats (FLOAT), whose blocks have SCALES scales each; BESIDE: with zero points, or a
    factor a row. Else 8-bit floats with a scale for BLOCK_ROWS rows and 128 inputs (BLOCKED), or one a row, and inputs
    with a scale for 128 (GROUPED), or one a row.
    """
    GATED: gl.constexpr = ACT is not None
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = 32 if GATED else 64
    BK: gl.constexpr = 64 if PACKED else 128
    mma: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
        if PACKED
        else gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 32])
    )
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    bytes_: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    sixteen: gl.constexpr = [[8, 0]] if ROWS == 16 else []
    taken: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]] + sixteen,  # noqa: RUF005
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [ROWS, 128],
    )
    by_scales: gl.constexpr = (
        BY_1_SCALES if SCALES == 1 else (BY_2_SCALES if SCALES == 2 else (BY_4_SCALES if SCALES == 4 else BY_8_SCALES))
    )
    across: gl.constexpr = (
        gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        if PACKED
        else gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    )
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16 if PACKED else 8, rank=2)
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])

    more: gl.constexpr = [[0, 8]] if ROWS == 16 else []
    # A thread has a row of gate and the row of up that belongs to it.
    paired: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [32, 0]] + more,  # noqa: RUF005
        [[2, 0], [4, 0], [8, 0], [16, 0], [0, 1]],
        [[0, 2], [0, 4]],
        [],
        [64, ROWS],
    )

    column, tile = gl.program_id(0), gl.program_id(1)
    begin, stop = 0, (inputs + 255) // 256
    if SPLITS > 1:
        split, units = gl.program_id(2), stop
        begin, stop = split * units // SPLITS, (split + 1) * units // SPLITS
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, 64, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES * 2, ROWS, 128], swizzled)
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
            _ask(w_desc, bars, ring, place, row, outputs, begin + place, begin + place < stop, GATED, BK)
        i = gl.arange(0, ROWS, gl.SliceLayout(1, across))
        j = gl.arange(0, ROWS, gl.SliceLayout(0, flat))
        m = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
        # Rows past the expert's last pair repeat it and are not stored.
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
        r = gl.arange(0, 64, gl.SliceLayout(1, mma))
        local = column * OUT + (r % 32 + r // 32 * outputs if GATED else r)
        q = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, by_scales)))
        packed_row = column * OUT + (q % 32 + q // 32 * outputs if GATED else q)
        packed_row = expert.to(gl.int64) * expert_rows + packed_row
        at_w = (expert.to(gl.int64) * scale_rows + local // BLOCK_ROWS) * G
        at_x = held.to(gl.int64) * xs_row
        if PACKED:
            first = group_scales(scale_ptr, packed_row, G, 2 * begin, SCALES, GROUP, by_scales)
            second = group_scales(scale_ptr, packed_row, G, 2 * begin + 1, SCALES, GROUP, by_scales)
        if PDL and not GATED:
            gdc_wait()
        for place in gl.static_range(STAGES):
            _ask_inputs(x_rows, bars, x_ring, place, begin + place, inputs, begin + place < stop, across)
        acc = gl.zeros((64, ROWS), gl.float32, mma)
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
                none = gl.zeros((64, ROWS), gl.float32, mma)
                a = x_ring.index(2 * at.stage).permute((1, 0))
                part = warpgroup_mma(ring.index(2 * at.stage), a, none, use_acc=False)
                acc += part * gl.expand_dims(sx, 0) * gl.expand_dims(sw, 1)
                a = x_ring.index(2 * at.stage + 1).permute((1, 0))
                part = warpgroup_mma(ring.index(2 * at.stage + 1), a, none, use_acc=False)
                acc += part * gl.expand_dims(sx_two, 0) * gl.expand_dims(sw_two, 1)
            sync()
            following = unit + STAGES
            _ask(w_desc, bars, ring, at.stage, row, outputs, following, following < stop, GATED, BK)
            _ask_inputs(x_rows, bars, x_ring, at.stage, following, inputs, following < stop, across)
            at = at.next(STAGES)
        last = True
        if SPLITS > 1:
            last, acc = _combine(acc, partial_ptr, count_ptr, tile * gl.num_programs(0) + column, split, SPLITS)
        if last:
            if PACKED:
                if FLOAT and BESIDE:
                    acc *= gl.expand_dims(gl.load(beside_ptr + expert.to(gl.int64) * expert_rows + local), 1)
            else:
                if not BLOCKED:
                    acc *= gl.expand_dims(gl.load(scale_ptr + at_w), 1)
                if not GROUPED:
                    acc *= gl.expand_dims(gl.load(xs + at_x), 0)
            out = gl.convert_layout(acc, paired)
            if BIASED:
                b = gl.arange(0, 64, gl.SliceLayout(1, paired))
                b = column * OUT + (b % 32 + b // 32 * outputs if GATED else b)
                out += gl.expand_dims(gl.load(biases + expert.to(gl.int64) * expert_rows + b).to(gl.float32), 1)
            if GATED:
                gate, up = gl.split(gl.permute(gl.reshape(out, (2, 32, ROWS)), (1, 2, 0)))
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


def ring_fits(x: torch.Tensor, gate_up: Quantized, down: Quantized) -> bool:
    """Whether `quantized_ring_moe` takes these."""
    if x.dtype != torch.bfloat16 or not group_products(x.device):
        return False
    (_, width, hidden), inter = gate_up.shape, down.shape[2]
    whole = hidden % 64 == 0 and inter % 64 == 0 and width == 2 * inter
    return whole and all(_streams(weight) for weight in (gate_up, down))


def _streams(weight: Quantized) -> bool:
    data, scale = weight.data, weight.scale
    if isinstance(weight, Int8):
        return False
    if not (data.is_contiguous() and scale.is_contiguous() and data.data_ptr() % 16 == 0 and data.shape[-1] % 16 == 0):
        return False
    if isinstance(weight, Fp4):
        return weight.rounding.number is None and weight.group in (16, 32)
    if isinstance(weight, Fp8):
        wide = weight.scale.shape[-1] == 1 or weight.block[1] == WIDTH
        return weight.inputs.number == "fp8" and wide and weight.inputs.group in (0, WIDTH)
    group = weight.group
    grouped = group in (16, 32, 64) or group % WIDTH == 0 or group >= weight.inputs
    return weight.bits == 4 and grouped and weight.order is None and scale.dtype == torch.bfloat16


def splits_of(programs: int, units: int, multiprocessors: int) -> int:
    """How many programs share each tile of a pair, where there would be so many programs of so many units else."""
    return max(1, min(units // UNITS, MAX_SPLITS, PROGRAMS * multiprocessors // programs))


def quantized_ring_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Quantized,
    down: Quantized,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    biases: ExpertBiases | None,
    splits: int = 0,
) -> torch.Tensor:
    """`moe_gemm` of what `ring_fits` takes. splits: programs that share a tile of a pair; 0: what `splits_of` says."""
    x, experts = x.contiguous(), experts.contiguous()
    (t, hidden), k, count = x.shape, experts.shape[1], gate_up.data.shape[0]
    pairs, inter = t * k, down.shape[2]
    alone = pairs <= ALONE_PAIRS
    where: tuple[torch.Tensor | None, ...] = (experts, None, None)
    tiles = pairs
    if not alone:
        order = ordered(workspace, experts, count, ROWS)
        where, tiles = (order.order, order.offsets, order.ends), order.tiles
    h = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)

    def product(source: torch.Tensor, weight: Quantized, target: torch.Tensor, act: str | None) -> None:
        bias = None if biases is None else (biases.down if act is None else biases.gate_up)
        outputs = target.shape[1]
        height, inputs = 64 if act is None else 32, source.shape[1]
        source, scales, held, constants = _operands(workspace, source, weight)
        strides = (0, 0) if scales is None else scales.stride()
        columns, units, shared = outputs // height, cdiv(inputs, UNIT), 1
        partials: torch.Tensor | None = None
        counts: torch.Tensor | None = None
        if alone:
            shared = splits or splits_of(columns * tiles, units, multiprocessors(x.device))
        if shared > 1:
            partials = torch.empty(columns * tiles * shared * HEIGHT, dtype=torch.float32, device=x.device)
            counts = workspace.counters("splits of experts' products", _ARRIVALS)
            constants["STAGES"] = min(constants["STAGES"], cdiv(units, shared))
        workspace.launch(quantized_list_kernel, (columns, tiles, shared))(
            source, scales, boxes(weight.data.flatten(0, 1), height, 64 if constants["PACKED"] else 128), *held, bias,
            *where, weights, target, partials, counts, count, inputs, outputs, weight.shape[1], weight.scale.shape[-1],
            weight.scale.shape[1], *strides, limit or 0.0,
            TOP=k, ROWS=8 if alone else ROWS, ALONE=alone, SPLITS=shared, BLOCK_E=next_power_of_2(count),
            **constants, ACT=act, LIMITED=act is not None and limit is not None, BIASED=bias is not None,
            PDL=workspace.pdl, num_warps=4, launch_pdl=workspace.pdl,
        )  # fmt: skip

    product(x, gate_up, h, activation)
    product(h, down, y, None)
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)


def _operands(
    workspace: Workspace, x: torch.Tensor, weight: Quantized
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, ...], dict[str, Any]]:
    """x and its scales as the product takes them, the weight's scales and what stands beside them, and what is compiled
    in."""
    constants: dict[str, Any] = {"BLOCK_ROWS": 1, "BLOCKED": False, "GROUPED": False, "STAGES": 6}
    if isinstance(weight, (Fp8, Int8)):
        numbers, scales = quantized(workspace, x, weight.inputs)
        constants |= {
            "PACKED": False, "FLOAT": False, "GROUP": 0, "SCALES": 1, "BESIDE": False, "STAGES": 4,
            "BLOCK_ROWS": weight.block[0], "BLOCKED": weight.scale.shape[-1] > 1, "GROUPED": scales.shape[1] > 1,
        }  # fmt: skip
        return numbers, scales, (weight.scale, None), constants
    whole = weight.group >= weight.inputs
    beside = weight.factor if isinstance(weight, Fp4) else weight.zero
    constants |= {
        "PACKED": True, "FLOAT": isinstance(weight, Fp4), "GROUP": 0 if whole else weight.group,
        "SCALES": 1 if whole else max(1, WIDTH // weight.group), "BESIDE": beside is not None,
    }  # fmt: skip
    return x, None, (weight.scale, beside), constants
