# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Products of 4 to 64 rows with Q4_K blocks of GGUF files on Hopper, in Gluon: rows of x are the columns of the matrix
instructions, so that a weight is unpacked once for all of them.

Work is cut as in `stream`: a slice is a unit of 256 inputs. The bulk copy engine fills a ring with the bits of a unit's
numbers, which begin on 16 bytes, and with x. A unit's scales come into registers while the unit before is multiplied,
and stand in shared memory as 16-bit floats: each is made once, and read by the threads that unpack its group. Numbers
get their scales before the product (`gguf_scaled`), in the inputs' dtype, as where weights are written out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_box, sync, view
from kernels.hopper.epilogue import close_tile
from kernels.hopper.ring import barriers, cursor
from kernels.hopper.schedule import SHARED_BYTES, first_unit, next_slice, next_unit, work_of
from kernels.linear.gguf_operand import (
    along,
    along_rows,
    along_warps,
    chunk_of,
    coming_scales,
    header_layout,
    num_chunks,
    unit_bytes,
)
from kernels.linear.gguf_scaled import (
    LOWERED,
    columns,
    columns_layout,
    rows_layout,
    scaled,
    store_factors,
)
from kernels.linear.quantized_operand import KINDS
from kernels.linear.stream import aligned
from kernels.weight import GgufBlocks
from kernels.workspace import Workspace

# The format; the byte of a unit of 256 inputs at which its numbers begin, and their bytes.
FORMAT, START, BITS = gl.constexpr("Q4_K"), gl.constexpr(16), gl.constexpr(128)
# Inputs of a unit, the fewest and the most rows.
WIDTH, FEW_ROWS, MAX_ROWS = 256, 4, 64
# Of shared memory, what a program has beside rings, scales and sums, at most.
RESERVED_BYTES = 1536


@gluon.jit
def _ask_weights(desc, bars, ring, stage, tile, up_row, unit, live, BYTES: gl.constexpr, WIDE: gl.constexpr):
    """Asks for a unit's bits of a tile of rows, and with WIDE of 2 of those up_row behind them."""
    BN: gl.constexpr = ring.shape[1]
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=live)
    column = unit * unit_bytes(FORMAT) + START
    for wide in gl.static_range(WIDE):
        load_box(desc, [tile * BN + up_row * wide, column], bar, ring.index(stage * WIDE + wide), pred=live)


@gluon.jit
def _ask_scales(word_ptr, short_ptr, half_ptr, N, B, tile, unit, WIDE: gl.constexpr, CELLS: gl.constexpr):
    """Scales of a unit on their way, of each block of a tile's rows; rows that are not there have the last one's."""
    BYTES: gl.constexpr = unit_bytes(FORMAT)
    HEADER: gl.constexpr = header_layout(gl.num_warps())
    made = ()
    for wide in gl.static_range(WIDE):
        first = tile * 16 * gl.num_warps()
        row = gl.minimum(first + along_warps(CELLS) * 16 + along_rows(16, CELLS), N - 1) + N * wide
        own = row.to(gl.int64) * (B // 2) + unit * (BYTES // 2)
        row = gl.minimum(first + along_warps(HEADER) * 16 + along_rows(16, HEADER), N - 1) + N * wide
        header = row.to(gl.int64) * (B // 4) + unit * (BYTES // 4)
        raw = coming_scales(word_ptr, short_ptr, half_ptr, header, own, along(8, CELLS), FORMAT)
        made = made + (raw,)  # noqa: RUF005
    return made


@gluon.jit
def _chunks(ring, place):
    """Words [BN, 8] of a unit's chunks."""
    WORDS: gl.constexpr = rows_layout(gl.num_warps())
    made = ()
    for i in gl.static_range(num_chunks(FORMAT, False)):
        made = made + (ring.index(place).slice(8 * i, 8, 1).load(WORDS),)  # noqa: RUF005
    return made


@gluon.jit
def _add_unit(acc, acc_up, ring, stage, x, factors, WIDE: gl.constexpr):
    """Sums [BN, BM] with a unit more. ring: words; x [BM, 256] and factors [WIDE][8, BN, 1] in shared memory."""
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    COLUMNS: gl.constexpr = columns_layout(acc.shape[1], gl.num_warps())
    bits = _chunks(ring, stage * WIDE)
    bits_up = bits
    if WIDE == 2:
        bits_up = _chunks(ring, stage * WIDE + 1)
    for group in gl.static_range(8):
        right_side = columns(x.slice(32 * group, 32, 1).load(COLUMNS), right)
        own = bits[chunk_of(FORMAT, False, group)]
        acc = mma_v2(scaled(own, factors[0], group, FORMAT, x.dtype, left), right_side, acc)
        if WIDE == 2:
            own = bits_up[chunk_of(FORMAT, False, group)]
            acc_up = mma_v2(scaled(own, factors[1], group, FORMAT, x.dtype, left), right_side, acc_up)
    return acc, acc_up


@gluon.jit(do_not_specialize=["M"])
def gguf_stream_kernel(
    x_desc, w_desc, word_ptr, short_ptr, half_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, B, y_stride, residual_stride,
    BM: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See `kernels.linear.stream.stream_kernel`; a tile has 16 outputs a warp. B: bytes of a row. The weight's bytes
    are read as words of 32 bits, of 16 and as 16-bit floats."""
    W: gl.constexpr = gl.num_warps()
    BN: gl.constexpr = 16 * W
    WIDE: gl.constexpr = 1 if ACT is None else 2
    DTYPE: gl.constexpr = x_desc.dtype
    BYTES: gl.constexpr = BITS * BN * WIDE + BM * 512
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    CELLS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slices = K // 256
    units = (N + BN - 1) // BN * slices
    first = first_unit(program, units, programs)
    stop = first_unit(program + 1, units, programs)
    if PDL:
        gdc_launch_dependents()

    w_ring = gl.allocate_shared_memory(gl.uint8, [STAGES * WIDE, BN, BITS], w_desc.layout)
    x_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 256], x_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    factors = gl.allocate_shared_memory(gl.int32, [2 * WIDE, 8, BN, 1], flat)
    bars = barriers(STAGES, 1)
    fence_async_shared()

    ask_tile = first // slices
    ask_slice = first % slices
    x_slice = ask_slice
    next_tile, following = ask_tile, ask_slice
    for place in gl.static_range(STAGES):
        _ask_weights(w_desc, bars, w_ring, place, ask_tile, N, ask_slice, first + place < stop, BYTES, WIDE)
        ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
    coming = _ask_scales(word_ptr, short_ptr, half_ptr, N, B, next_tile, following, WIDE, CELLS)
    for wide in gl.static_range(WIDE):
        store_factors(factors.index(wide), coming[wide], along(8, CELLS), FORMAT, DTYPE, CELLS)
    next_tile, following = next_unit(next_tile, following, slices)
    coming = _ask_scales(word_ptr, short_ptr, half_ptr, N, B, next_tile, following, WIDE, CELLS)
    if PDL:
        gdc_wait()
    for place in gl.static_range(STAGES):
        load_box(x_desc, [0, x_slice * 256], bars.index(place), x_ring.index(place), pred=first + place < stop)
        x_slice = next_slice(x_slice, slices)
    sync()

    words = view(w_ring, gl.int32, [STAGES * WIDE, BN, BITS // 4], gl.NVMMASharedLayout(128, 32, 2))
    at = cursor(first * 0)
    for tile in range(first // slices, (stop + slices - 1) // slices):
        begin = gl.maximum(first, tile * slices)
        end = gl.minimum(stop, (tile + 1) * slices)
        acc = gl.zeros((BN, BM), gl.float32, mma)
        acc_up = acc
        for unit in range(begin, end):
            side = (unit - first) % 2 * WIDE
            for wide in gl.static_range(WIDE):
                other = factors.index(WIDE - side + wide)
                store_factors(other, coming[wide], along(8, CELLS), FORMAT, DTYPE, CELLS)
            next_tile, following = next_unit(next_tile, following, slices)
            coming = _ask_scales(word_ptr, short_ptr, half_ptr, N, B, next_tile, following, WIDE, CELLS)
            own = (factors.index(side), factors.index(side + WIDE - 1))
            mbarrier.wait(bars.index(at.stage), at.phase)
            acc, acc_up = _add_unit(acc, acc_up, words, at.stage, x_ring.index(at.stage), own, WIDE)
            sync()
            more = unit + STAGES < stop
            _ask_weights(w_desc, bars, w_ring, at.stage, ask_tile, N, ask_slice, more, BYTES, WIDE)
            load_box(x_desc, [0, ask_slice * 256], bars.index(at.stage), x_ring.index(at.stage), pred=more)
            ask_tile, ask_slice = next_unit(ask_tile, ask_slice, slices)
            at = at.next(STAGES)
        if gl.bfloat16 == DTYPE:
            acc *= LOWERED
            acc_up *= LOWERED
        close_tile(
            acc, acc_up, tile, begin, end, slices, units, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
            M, N, y_stride, residual_stride, SHARED, ACT, BIAS, RESIDUAL,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufStreamTile:
    """How `gguf_stream_kernel` is cut: rows (8, 16, 32 or 64), warps of 16 outputs (4 or 8; behind an activation of as
    many of gate and of up), programs of each multiprocessor, the most stages of the ring."""

    rows: int
    warps: int
    programs: int
    stages: int = 6

    def fitting(self, wide: int) -> int:
        """As many stages as fit into the shared memory of a multiprocessor, and no more than that."""
        outputs = 16 * self.warps
        stage = BITS.value * outputs * wide + 2 * WIDTH * self.rows
        factors = 2 * wide * 32 * outputs
        sums = 4 * outputs * self.rows
        return min(self.stages, (SHARED_BYTES // self.programs - RESERVED_BYTES - factors - sums) // stage)


def streams_blocks(x: torch.Tensor, weight: GgufBlocks) -> bool:
    """Whether `gguf_stream` takes rows x [T, K] and a weight: 4 to 64 rows of whole units, which the bulk copy engine
    can read, and Q4_K blocks alone."""
    return (
        FEW_ROWS <= len(x) <= MAX_ROWS
        and x.dtype in KINDS
        and x.shape[1] % WIDTH == 0
        and aligned(x)
        and weight.formats == (FORMAT.value,)
        and weight.parts[0].data_ptr() % 16 == 0
        and group_products(x.device)
    )


def gguf_stream(
    workspace: Workspace, x: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, tile: GgufStreamTile, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """x [T, K] by Q4_K blocks `part` [N, bytes], whose second half is up's behind an activation. counts: zeros, one for
    each tile of outputs, left zero."""
    (m, k), wide = x.shape, 2 if activation else 1
    n, outputs = len(part) // wide, 16 * tile.warps
    work = work_of(x, n, tile.rows, outputs, WIDTH, wide, 0, tile.programs * multiprocessors(x.device))
    workspace.launch(gguf_stream_kernel, (work.programs,))(
        boxes(x, tile.rows, WIDTH, swizzle=64), boxes(part, outputs, BITS.value),
        part.view(torch.int32), part.view(torch.int16), part.view(torch.float16),
        bias, residual, work.y, work.partials, counts,
        m, n, k, part.shape[-1], n, residual.stride(0) if residual is not None else 0,
        BM=tile.rows, STAGES=tile.fitting(wide), SHARED=work.shared, ACT=activation, BIAS=bias is not None,
        RESIDUAL=residual is not None, PDL=workspace.pdl, num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return work.y
