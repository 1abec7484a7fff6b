# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of 2 to 64 rows with a large weight on Hopper, in Gluon: the weight streams through shared memory.

Weight tiles are the long side of the matrix unit (64 outputs an instruction), the rows of x its short side. The bulk
copy engine (TMA) fills a ring of tiles in shared memory; its first tiles are asked for before the kernel before has
finished, so the memory never waits for a launch, a norm or the last sums of another product.

Work is cut evenly whatever the shape: the tiles' slices of inputs stand in one row, and every program takes an equal
range of it (stream-K, Osama et al. 2023, arXiv:2301.03598). A tile that several programs share is summed by the last
of them to finish, in the order of the inputs, so the result does not depend on which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_box, sync
from kernels.hopper.epilogue import close_tile
from kernels.hopper.mma import weight_product
from kernels.hopper.ring import barriers, load_weights
from kernels.hopper.schedule import first_unit, next_slice, next_unit, work_of
from kernels.workspace import Workspace

NARROW = (torch.bfloat16, torch.float16)


@gluon.jit(do_not_specialize=["M"])
def stream_kernel(
    x_desc, w_desc, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, y_stride, residual_stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    WHOLE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """M ≤ BM rows. With ACT, N counts outputs and the weight has 2N rows. SHARED: whether programs share tiles; then
    partial_ptr has room for a partial tile (two with ACT) for the first and for the last tile of each program, and
    count_ptr a zero for each tile. WHOLE: a program's range begins and ends between tiles."""
    WIDE: gl.constexpr = 1 if ACT is None else 2
    BYTES: gl.constexpr = (BN * WIDE + BM) * BK * 2
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = (K + BK - 1) // BK
    units = (N + BN - 1) // BN * slices
    if WHOLE:
        first = first_unit(program, units // slices, programs) * slices
        stop = first_unit(program + 1, units // slices, programs) * slices
    else:
        first = first_unit(program, units, programs)
        stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WIDE, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    bars = barriers(STAGES, 1)
    fence_async_shared()

    ask_tile = first // slices
    ask_slice = first % slices
    x_slice = ask_slice
    for place in gl.static_range(STAGES):
        load_weights(w_desc, bars, w_ring, place, ask_tile, N, ask_slice, first + place < stop, BYTES, BN, 1, WIDE)
        ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
    if PDL:
        gdc_wait()
    for place in gl.static_range(STAGES):
        load_box(x_desc, [0, x_slice * BK], bars.index(place), x_ring.index(place), pred=first + place < stop)
        x_slice = next_slice(x_slice, slices)

    turn = first * 0
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        acc = gl.zeros((BN, BM), gl.float32, mma)
        acc_up = acc
        for _ in range(begin, end):
            stage = turn % STAGES
            mbarrier.wait(bars.index(stage), (turn // STAGES) & 1)
            x = x_ring.index(stage).permute((1, 0))
            acc, acc_up = weight_product(acc, acc_up, w_ring, stage, x, WIDE)
            sync()
            more = first + turn + STAGES < stop
            load_weights(w_desc, bars, w_ring, stage, ask_tile, N, ask_slice, more, BYTES, BN, 1, WIDE)
            load_box(x_desc, [0, ask_slice * BK], bars.index(stage), x_ring.index(stage), pred=more)
            ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
            turn += 1

        close_tile(
            acc, acc_up, tile, begin, end, slices, units, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
            M, N, y_stride, residual_stride, SHARED, ACT, BIAS, RESIDUAL,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamTile:
    """How `stream_kernel` is cut: rows, outputs and inputs a tile, tiles of the ring, programs, warps.

    Outputs are a multiple of 16 · warps, rows of 8; behind an activation a tile has as many rows of gate and of up.
    programs: of each multiprocessor, unless `split` says how many there are for each tile of outputs. whole: no tile is
    shared, though there are fewer programs than tiles.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    programs: int = 1
    split: int = 0
    warps: int = 4
    whole: bool = False


def aligned(x: torch.Tensor) -> bool:
    """Whether the bulk copy engine can read x, of 16-bit numbers: whole rows on 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def weight_aligned(weight: torch.Tensor) -> bool:
    """Whether the bulk copy engine can read a contiguous weight."""
    return weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0


def streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the bulk copy engine can read both: 16-bit, whole rows on 16 bytes."""
    return x.dtype in NARROW and aligned(x) and weight_aligned(weight)


def stream_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, tile: StreamTile, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear` without a norm, for up to tile.rows rows; counts: zeros, one for each tile of outputs, left zero."""
    m, k = x.shape
    wide = 2 if activation else 1
    n = weight.shape[0] // wide
    most = tile.programs * multiprocessors(x.device)
    work = work_of(x, n, tile.rows, tile.outputs, tile.inputs, wide, 1 if tile.whole else tile.split, most)
    workspace.launch(stream_kernel, (min(work.programs, most) if tile.whole else work.programs,))(
        boxes(x, tile.rows, tile.inputs), boxes(weight, tile.outputs, tile.inputs),
        bias, residual, work.y, work.partials, counts,
        m, n, k, work.y.stride(0), residual.stride(0) if residual is not None else 0,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs, STAGES=tile.stages, SHARED=work.shared, WHOLE=tile.whole,
        ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None, PDL=workspace.pdl,
        num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
