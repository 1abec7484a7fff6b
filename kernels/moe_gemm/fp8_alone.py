# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The feed-forward parts of a few pairs of experts of 8-bit floats on Hopper, in Gluon: two products, each of which
quantizes its inputs itself.

A tile is a pair by HEIGHT rows of its expert's matrix; in front of an activation half of those are rows of gate, and
half the rows of up that belong to them. The matrix unit reads weights out of the ring in shared memory as they are
stored. Blocks of 128 inputs stand as columns of its other operand, as in `kernels.linear.fp8_row_stream`: of a block's
product one column is its own, and the block's scale clears the others. A program quantizes those blocks alone that its
weights meet, once.

Where tiles are too few to fill the GPU, several programs share a tile's inputs, as in `quantized_list`. Programs of the
down product ask for their weights and scales while the up product ends.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import sync, view
from kernels.hopper.ring import barriers, cursor
from kernels.linear.quantized_row import COLUMNS, PIECE, piece_of, scale_of, stage_blocks
from kernels.moe_gemm import alone_cut
from kernels.moe_gemm.alone_cut import AloneCut, fp8_cut
from kernels.moe_gemm.expert_tiles import (
    Quantized,
    ask_unit,
    combine_splits,
    matrix_row,
    pair_expert,
    shared_tiles,
    split_range,
    whole_tiles,
    write_pairs,
    written_layout,
)
from kernels.moe_gemm.tiles import combined
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv
from kernels.weight import Fp8
from kernels.workspace import Workspace

# The most inputs of a product.
MAX_INPUTS = 16384
HEIGHT, UNIT = gl.constexpr(alone_cut.HEIGHT), gl.constexpr(alone_cut.UNIT)


@gluon.constexpr_function
def segments_layout(segments, height):
    """[segments, rows of each] of a tile's rows [height], where they stand in the matrix instructions' sums of four
    warps."""
    each = height // segments
    rows = [[row // each, row % each] for row in (1, 2, 4, 8, 16, 32)]
    lanes = [[0, 0], [0, 0], rows[0], rows[1], rows[2]]
    return gl.DistributedLinearLayout([rows[3]], lanes, [rows[4], rows[5]], [], [segments, each])


@gluon.jit
def _own_scales(
    f, x_row, given_ptr, inputs, PIECES: gl.constexpr, GROUPED: gl.constexpr, STATIC: gl.constexpr, POWER: gl.constexpr,
    LARGEST: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Scales [H] of blocks f [H, 128] of the row of `inputs` numbers at x_row. See `kernels.quantize`."""
    by_block: gl.constexpr = gl.SliceLayout(1, f.type.layout)
    same = gl.zeros([f.shape[0]], gl.float32, by_block)
    if STATIC:
        return same + gl.load(given_ptr)
    if GROUPED:
        largest = gl.max(gl.abs(f), axis=1)
    else:
        most = gl.zeros([PIECE], gl.float32, WHOLE)
        for number in gl.static_range(PIECES):
            most = gl.maximum(most, gl.abs(piece_of(x_row, number, inputs, WHOLE).to(gl.float32)))
        largest = same + gl.max(most, axis=0)
    if LARGEST is not None:
        largest = gl.minimum(largest, LARGEST)
    return scale_of(largest, POWER)


@gluon.jit
def _weight_scales(
    scale_ptr, matrix_scales, column, block, outputs, G,
    HELD: gl.constexpr, SEGMENTS: gl.constexpr, OUT: gl.constexpr, BLOCK_ROWS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Scales [HELD, SEGMENTS] of a tile's runs of rows and of HELD blocks from `block` on. What lies behind the inputs
    has the scale of the last block."""
    spread: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    run = gl.arange(0, SEGMENTS, gl.SliceLayout(0, spread)) * (HEIGHT // SEGMENTS)
    row = matrix_scales + matrix_row(column, run, outputs, OUT, GATED) // BLOCK_ROWS
    group = gl.minimum(block + gl.arange(0, HELD, gl.SliceLayout(1, spread)), G - 1)
    return gl.load(scale_ptr + gl.expand_dims(row * G, 0) + gl.expand_dims(group, 1))


@gluon.jit
def _spread(by_segment, SEGMENTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Numbers of a tile's runs of rows [SEGMENTS] as one a row [HEIGHT], in LAYOUT."""
    runs: gl.constexpr = segments_layout(SEGMENTS, HEIGHT)
    wide = gl.expand_dims(by_segment, 1) + gl.zeros([SEGMENTS, HEIGHT // SEGMENTS], gl.float32, runs)
    return gl.convert_layout(gl.reshape(wide, [HEIGHT]), LAYOUT)


@gluon.jit
def fp8_alone_kernel(
    x, given_ptr, w_desc, scale_ptr, biases, chosen, weights, y, partial_ptr, count_ptr,
    num_experts, inputs, outputs, expert_rows, G, scale_rows, limit,
    TOP: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, PIECES: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, SEGMENTS: gl.constexpr, BLOCKED: gl.constexpr, GROUPED: gl.constexpr,
    STATIC: gl.constexpr, POWER: gl.constexpr, LARGEST: gl.constexpr,
    ACT: gl.constexpr, LIMITED: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[pair] = act(x[token] · gate) ∘ (x[token] · up), or weight · x[pair] · matrix without ACT, for HEIGHT rows of
    one pair's matrix; an expert has expert_rows rows of it, a multiple of HEIGHT, and scale_rows rows of G scales.
    SPLITS: programs that share a tile's inputs; of more than one, partial_ptr and count_ptr are as in `combine_splits`.

    HELD: a power of two, 8 or more, that the blocks of a program's units fit in. PIECES: those of the row. The weight
    has a scale for BLOCK_ROWS rows and 128 inputs (BLOCKED), or one a row; rows of a tile have SEGMENTS of them. x has
    a scale for 128 inputs (GROUPED), or one a row, or (STATIC) the one at given_ptr; see `kernels.weight.inputs`.
    """
    GATED: gl.constexpr = ACT is not None
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 32])
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    coming: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    whole: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    by_segment: gl.constexpr = gl.SliceLayout(1, segments_layout(SEGMENTS, HEIGHT))
    rows_of_8: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 128], gl.float8e4nv)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    one: gl.constexpr = gl.SliceLayout(0, written_layout(WARPS))

    column, pair = gl.program_id(0), gl.program_id(1)
    split, begin, stop = split_range(inputs, UNIT, SPLITS)
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, HEIGHT, 128], w_desc.layout)
    bars = barriers(STAGES, 1)
    x_boxes = gl.allocate_shared_memory(gl.float8e4nv, [HELD // COLUMNS, COLUMNS, 128], rows_of_8)
    x_scales = gl.allocate_shared_memory(gl.float32, [HELD, COLUMNS], plain)
    if BLOCKED:
        w_scales = gl.allocate_shared_memory(gl.float32, [HELD, SEGMENTS], plain)
    fence_async_shared()
    # blocks of the row that the program's units meet
    block = 2 * begin + gl.arange(0, HELD, gl.SliceLayout(1, coming))
    spot = gl.expand_dims(block * 128, 1) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, coming)), 0)
    met = gl.expand_dims(block < 2 * stop, 1) & (spot < inputs)
    x_row = x + (pair // TOP if GATED else pair).to(gl.int64) * inputs
    if PDL:
        if GATED:
            gdc_wait()
        # behind the wait: the down product may then read what was chosen before it waits itself
        gdc_launch_dependents()
    expert, here = pair_expert(chosen, pair, num_experts)
    if GATED:
        wide = gl.load(x_row + spot, mask=met, other=0.0)
    if here:
        row = expert * expert_rows + column * OUT
        for stage in gl.static_range(STAGES):
            ask_unit(w_desc, bars, ring, stage, row, outputs, begin + stage, begin + stage < stop, GATED)
        matrix_scales = expert.to(gl.int64) * scale_rows
        if BLOCKED:
            beside = _weight_scales(
                scale_ptr, matrix_scales, column, 2 * begin, outputs, G, HELD, SEGMENTS, OUT, BLOCK_ROWS, GATED
            )
        else:
            local = matrix_row(column, gl.arange(0, HEIGHT, gl.SliceLayout(1, mma)), outputs, OUT, GATED)
            beside = gl.load(scale_ptr + matrix_scales + local // BLOCK_ROWS)
        if not GATED:
            weight = gl.load(weights + pair, cache_modifier=".cg")
            if PDL:
                gdc_wait()
            wide = gl.load(x_row + spot, mask=met, other=0.0)
        else:
            weight = 1.0
        f = wide.to(gl.float32)
        own = _own_scales(f, x_row, given_ptr, inputs, PIECES, GROUPED, STATIC, POWER, LARGEST, whole)
        stage_blocks(f, own, x_boxes, x_scales)
        if BLOCKED:
            view(w_scales, gl.float32, [HELD, SEGMENTS], matrix).store(beside)
        fence_async_shared()
        sync()

        at = cursor(pair * 0)
        acc = gl.zeros((HEIGHT, COLUMNS), gl.float32, mma)
        none = acc
        for unit in range(begin, stop):
            scales = ()
            for half in gl.static_range(2):
                place = 2 * (unit - begin) + half
                by = gl.expand_dims(x_scales.index(place).load(columns), 0)
                if BLOCKED:
                    by_row = _spread(w_scales.index(place).load(by_segment), SEGMENTS, gl.SliceLayout(1, mma))
                    by = by * gl.expand_dims(by_row, 1)
                scales = scales + (by,)  # noqa: RUF005
            mbarrier.wait(bars.index(at.stage), at.phase)
            sums = ()
            for half in gl.static_range(2):
                x_box = x_boxes.index((2 * (unit - begin) + half) // COLUMNS).permute((1, 0))
                w_box = ring.index(2 * at.stage + half)
                sums = sums + (warpgroup_mma(w_box, x_box, none, use_acc=False, is_async=True),)  # noqa: RUF005
            sums = warpgroup_mma_wait(0, deps=sums)
            sync()
            following = unit + STAGES
            ask_unit(w_desc, bars, ring, at.stage, row, outputs, following, following < stop, GATED)
            at = at.next(STAGES)
            for half in gl.static_range(2):
                acc += sums[half] * scales[half]
        total = gl.expand_dims(gl.sum(acc, axis=1), 1)
        if not BLOCKED:
            total *= gl.expand_dims(beside, 1)
        last = True
        if SPLITS > 1:
            tile = pair * gl.num_programs(0) + column
            last, total = combine_splits(total, partial_ptr, count_ptr, tile, split, SPLITS)
        if last:
            its = pair + gl.arange(0, 1, one)
            write_pairs(
                total, column, expert, its, weight + its * 0.0, 1, biases, y, outputs, expert_rows, limit, ACT, LIMITED,
                BIASED,
            )  # fmt: skip
    elif PDL and not GATED:
        gdc_wait()


def alone_fits(x: torch.Tensor, gate_up: Quantized, down: Quantized) -> bool:
    """Whether `fp8_alone_moe` takes these, but for the number of pairs."""
    if x.dtype != torch.bfloat16 or not group_products(x.device) or not whole_tiles(gate_up, down):
        return False
    short = max(gate_up.shape[2], down.shape[2]) <= MAX_INPUTS
    return short and all(_streams(weight) for weight in (gate_up, down))


def _streams(weight: Quantized) -> bool:
    if not isinstance(weight, Fp8):
        return False
    data, scale, inputs = weight.data, weight.scale, weight.inputs
    wide = scale.shape[-1] == 1 or weight.block[1] == alone_cut.WIDTH
    read = data.is_contiguous() and scale.is_contiguous() and data.data_ptr() % 16 == 0
    return read and wide and inputs.number == "fp8" and inputs.group in (0, alone_cut.WIDTH)


def runs_of(weight: Fp8) -> int:
    """Of a tile's rows, runs that have the same scales, as far as their numbers tell."""
    rows = weight.block[0]
    return alone_cut.HEIGHT // min(alone_cut.HEIGHT // 2, rows & -rows)


def fp8_alone_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Fp8,
    down: Fp8,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    biases: ExpertBiases | None,
    cuts: tuple[AloneCut, AloneCut] | None = None,
) -> torch.Tensor:
    """`moe_gemm` of up to ALONE_PAIRS pairs that `alone_fits` takes. cuts: of both products, else what `fp8_cut`
    says."""
    x, experts = x.contiguous(), experts.contiguous()
    (t, hidden), k, count = x.shape, experts.shape[1], gate_up.data.shape[0]
    pairs = t * k
    h = torch.empty(pairs, down.shape[2], dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)

    def product(
        source: torch.Tensor, weight: Fp8, target: torch.Tensor, bias: torch.Tensor | None, act: str | None
    ) -> None:
        (_, rows, inputs), outputs, given = weight.shape, target.shape[1], weight.inputs
        height = alone_cut.HEIGHT if act is None else alone_cut.HEIGHT // 2
        columns, each, blocked = cdiv(outputs, height), runs_of(weight), weight.scale.shape[-1] > 1
        if cuts is None:
            cut = fp8_cut(columns, t, k, inputs, each if blocked else 0, multiprocessors(x.device))
        else:
            cut = cuts[0 if act else 1]
        partials, counts = shared_tiles(workspace, columns * pairs, cut.splits, alone_cut.HEIGHT)
        workspace.launch(fp8_alone_kernel, (columns, pairs, cut.splits))(
            source, given.scale, boxes(weight.data.flatten(0, 1), height, alone_cut.WIDTH), weight.scale, bias, experts,
            weights, target, partials, counts,
            count, inputs, outputs, rows, weight.scale.shape[-1], weight.scale.shape[1], limit or 0.0,
            TOP=k, SPLITS=cut.splits, STAGES=cut.stages, HELD=cut.held(inputs), PIECES=cdiv(inputs, PIECE.value),
            BLOCK_ROWS=weight.block[0], SEGMENTS=each, BLOCKED=blocked, GROUPED=given.group > 0,
            STATIC=given.scale is not None, POWER=given.power_of_two, LARGEST=given.largest, ACT=act,
            LIMITED=act is not None and limit is not None, BIASED=bias is not None,
            PDL=workspace.pdl, num_warps=4, launch_pdl=workspace.pdl,
        )  # fmt: skip

    product(x, gate_up, h, None if biases is None else biases.gate_up, activation)
    product(h, down, y, None if biases is None else biases.down, None)
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)
