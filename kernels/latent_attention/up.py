# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Latents taken through the up-projection on Hopper, in Gluon: a warp reads, two groups of warps multiply.

As the grouped product of experts does it (`kernels.moe_gemm.grouped`), with a sequence's entries in place of an
expert's pairs: the bulk copy engine (TMA) brings them from where blocks hold them.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes, cache_rows, rows_of, whole_rows
from kernels.hopper.compat import load_box, view
from kernels.hopper.epilogue import emit, halves
from kernels.hopper.mma import ring_product
from kernels.hopper.ring import cursor, filling_cursor, ring_of
from kernels.hopper.schedule import plus
from kernels.moe_gemm.grouped import REGISTERS
from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace

# Entries of a tile, outputs of a tile, channels of a slice. Slices that shared memory holds.
ENTRIES, OUTPUTS, BOX = 128, 256, 64
STAGES = 3
# Sequences that one compiled kernel serves; more of them take another.
SEQS = 128


@gluon.jit
def _tiles(p_context, first_seq, seqs, ENTRIES: gl.constexpr, SEQS: gl.constexpr, WARPS: gl.constexpr):
    """Up to where tiles of each sequence and of those before it reach."""
    each = gl.arange(0, SEQS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    length = gl.load(p_context + first_seq + each, mask=each < seqs, other=0)
    return gl.associative_scan((length + ENTRIES - 1) // ENTRIES, 0, plus), each < seqs


@gluon.jit
def _entries(p_context, first_seq, seqs, tile, ENTRIES: gl.constexpr, SEQS: gl.constexpr, WARPS: gl.constexpr):
    """Sequence of a tile, its first entry there, and the sequence's length."""
    upto, there = _tiles(p_context, first_seq, seqs, ENTRIES, SEQS, WARPS)
    before = (upto <= tile) & there
    seq = first_seq + gl.sum(before.to(gl.int32), axis=0)
    first = (tile - gl.max(gl.where(before, upto, 0), axis=0)) * ENTRIES
    return seq, first, gl.load(p_context + seq)


@gluon.jit
def _feed(
    c_desc, w_desc, p_table, p_context, x_ring, w_ring, ring, works, columns, slices, table_stride, block_rows,
    first_seq, seqs,
    BLOCK_SIZE: gl.constexpr, COPIED: gl.constexpr, ENTRIES: gl.constexpr, SEQS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring: a stage holds two boxes of entries and four of the matrix."""
    COPIES: gl.constexpr = ENTRIES // COPIED
    pieces = view(x_ring, c_desc.dtype, [STAGES * COPIES, COPIED, 64], c_desc.layout)
    program = gl.program_id(0)
    at = filling_cursor(program * 0)
    for work in range(program, works, gl.num_programs(0)):
        column = work % columns
        seq, first, length = _entries(p_context, first_seq, seqs, work // columns, ENTRIES, SEQS, 1)
        blocks = p_table + seq.to(gl.int64) * table_stride
        rows = cache_rows(blocks, first, length, block_rows, BLOCK_SIZE, COPIED, COPIES)
        for slice_ in range(slices):
            bar = ring.acquire(at, (ENTRIES + 256) * 64 * 2)
            w = w_ring.index(at.stage)
            for part in gl.static_range(4):
                load_box(w_desc, [column * 256 + part * 64, slice_ * 64], bar, w.slice(part * 64, 64))
            for copy in gl.static_range(COPIES):
                load_box(c_desc, [rows[copy], slice_ * 64], bar, pieces.index(at.stage * COPIES + copy))
            at = at.next(STAGES)


@gluon.jit
def _multiply(
    y_desc, cache, p_table, p_context, p_rotated, x_ring, w_ring, out, ring, works, columns, slices,
    table_stride, block_rows, first_seq, seqs,
    LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr, ENTRIES: gl.constexpr, SEQS: gl.constexpr, STAGES: gl.constexpr,
    TEAM: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 entries of every tile of its program. Rows past a sequence's end are zeros."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    program = gl.program_id(0)
    at = cursor(program * 0)
    for work in range(program, works, gl.num_programs(0)):
        tile = work // columns
        column = work % columns
        seq, first, length = _entries(p_context, first_seq, seqs, tile, ENTRIES, SEQS, 4)
        first += TEAM * 64
        acc = gl.zeros((64, 256), gl.float32, mma)
        acc, at = ring_product(acc, x_ring, w_ring, ring, at, slices, TEAM, 0, False, STAGES)
        held = first + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout)) < length
        acc = gl.where(held[:, None], acc, 0.0)
        left, right = halves(acc, 128)
        a, b = halves(left, 64)
        c, d = halves(right, 64)
        n = column * 256
        emit(y_desc, out, 4 * TEAM, tile * ENTRIES + TEAM * 64, (n, n + 64, n + 128, n + 192), (a, b, c, d))
        if column == 0:
            row = gl.arange(0, 64, gl.SliceLayout(1, flat))
            channel = gl.arange(0, 64, gl.SliceLayout(0, flat))[None, :]
            j = first + row
            block = gl.load(p_table + seq.to(gl.int64) * table_stride + j // BLOCK_SIZE, mask=j < length, other=0)
            source = (block * block_rows + j % BLOCK_SIZE).to(gl.int64) * (LATENT + 64) + LATENT
            key = gl.load(cache + source[:, None] + channel, mask=(j < length)[:, None], other=0.0)
            place = (tile * ENTRIES + TEAM * 64 + row).to(gl.int64) * 64
            gl.store(p_rotated + place[:, None] + channel, key)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first_seq", "seqs"], do_not_specialize_on_alignment=["p_context"])
def up_kernel(
    c_desc, w_desc, y_desc, cache, p_table, p_context, p_rotated, table_stride, block_rows, first_seq, seqs, columns,
    slices,
    LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPIED: gl.constexpr, ENTRIES: gl.constexpr, SEQS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """kv = latents · kv_upᵀ for tiles of ENTRIES entries of a sequence, whose rotated keys are copied beside. Sequences
    stand one after another, each filled up to whole tiles."""
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, 64, 64], w_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 256, 64], w_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [8, 64, 64], y_desc.layout)
    ring = ring_of(STAGES, 1, 2)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    upto, _ = _tiles(p_context, first_seq, seqs, ENTRIES, SEQS, 4)
    works = gl.max(upto, axis=0) * columns
    gl.warp_specialize(
        [
            (_multiply, (
                y_desc, cache, p_table, p_context, p_rotated, x_ring, w_ring, out, ring, works, columns, slices,
                table_stride, block_rows, first_seq, seqs, LATENT, BLOCK_SIZE, ENTRIES, SEQS, STAGES, 0,
            )),
            (_multiply, (
                y_desc, cache, p_table, p_context, p_rotated, x_ring, w_ring, out, ring, works, columns, slices,
                table_stride, block_rows, first_seq, seqs, LATENT, BLOCK_SIZE, ENTRIES, SEQS, STAGES, 1,
            )),
            (_feed, (
                c_desc, w_desc, p_table, p_context, x_ring, w_ring, ring, works, columns, slices, table_stride,
                block_rows, first_seq, seqs, BLOCK_SIZE, COPIED, ENTRIES, SEQS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def suits(kv_up: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether the kernel takes these: 16-bit, whole boxes of channels and tiles of outputs, whole rows in the cache."""
    heads, own, latent = kv_up.shape
    width = cache.shape[-1]
    whole = whole_rows(cache[:, None]) and cache.shape[1] % 8 == 0
    sizes = latent % BOX == 0 and width - latent == BOX and heads * own % OUTPUTS == 0
    same = cache.dtype == kv_up.dtype != torch.float32
    return group_products(cache.device) and same and whole and sizes


def expand(
    workspace: Workspace,
    kv_up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    kv: torch.Tensor,
    rotated: torch.Tensor,
    first_seq: int,
) -> None:
    """Keys and values kv [rows, H · (nope + Dv)] and rotated keys [rows, rope] of the sequences from `first_seq` on,
    each filled up with zeros to a multiple of ENTRIES rows. Takes what `suits` says."""
    latent, width = kv_up.shape[-1], cache.shape[-1]
    block_size, block_rows, rows = cache.shape[1], cache.stride(0) // width, rows_of(cache[:, None])
    seqs = len(context_len) - first_seq
    copied = min(block_size, BOX)
    columns = kv.shape[1] // OUTPUTS
    workspace.launch(up_kernel, (min(multiprocessors(cache.device), kv.shape[0] // ENTRIES * columns),))(
        boxes(rows, copied, BOX), boxes(kv_up.flatten(0, 1), BOX, BOX), boxes(kv, BOX, BOX), cache, block_table,
        context_len, rotated, block_table.stride(0), block_rows, first_seq, seqs, columns, latent // BOX,
        LATENT=latent, BLOCK_SIZE=block_size, COPIED=copied, ENTRIES=ENTRIES,
        SEQS=max(SEQS, next_power_of_2(seqs)), STAGES=STAGES, PDL=workspace.pdl, num_warps=4, maxnreg=REGISTERS,
        launch_pdl=workspace.pdl,
    )  # fmt: skip
