# mypy: disable-error-code="no-untyped-def"
"""Products for each group of channels with weights of 8-bit floats in blocks, which few rows read as they are stored.

A weight's number becomes one of x's dtype, in registers and exactly; sums of a block of 128 inputs are multiplied by
its scale. To bfloat16 it goes by its bits, for conversions are slow: exponent and mantissa are moved to where bfloat16
has them, and the number is multiplied by 2^120, which is what the biases of the exponents differ by.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.group_linear.dense import GroupTile
from kernels.hardware import register_products, shared_bytes
from kernels.linear.skinny import INTERPRETED
from kernels.pipeline import fitting_stages
from kernels.prefetch import prefetch
from kernels.sizes import cdiv
from kernels.weight import Fp8
from kernels.workspace import Workspace

# Of scales: inputs and outputs of a block.
WIDTH = 128
# Rows of a tile from which on the weight is the product's long side: the fewest of Hopper's matrix instructions.
LONG = 64
# Cache lines of each output's weights that are asked for before the kernel before has finished.
AHEAD = 8


# Of four e4m3 numbers in a word, those in its lower and its upper half as pairs of bfloat16.
_TO_BF16: tl.constexpr = tl.constexpr("""
{
.reg .b32 low, high, sign, scale;
mov.b32 scale, 0x7B807B80;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
and.b32 sign, low, 0x80008000;
shr.u32 low, low, 4;
lop3.b32 low, low, 0x07F007F0, sign, 0xEA;
and.b32 sign, high, 0x80008000;
shr.u32 high, high, 4;
lop3.b32 high, high, 0x07F007F0, sign, 0xEA;
mov.b32 sign, 0x80008000;
fma.rn.bf16x2 $0, low, scale, sign;
fma.rn.bf16x2 $1, high, scale, sign;
}
""")


@triton.jit
def _exact(w, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """8-bit floats as numbers of DTYPE; BITS: by their bits. e4m3's NaN becomes 480 then."""
    if BITS:
        return tl.inline_asm_elementwise(_TO_BF16, "=r,=r,r", [w.to(tl.uint8, bitcast=True)], tl.bfloat16, True, 4)
    return w.to(tl.float32).to(DTYPE)


@triton.jit
def _added(
    acc, a_at, b_at, scales, first, k, size, a_live, b_live, TALL: tl.constexpr, BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [M, N] and the product of inputs first + k of a [M, K] and b [K, N]; TALL says that a is the weight, and else
    b. scales: where the outputs' scale of its first block is."""
    WIDTH: tl.constexpr = k.shape[0]
    inside = first + k < size
    scale = tl.load(scales + tl.minimum(first, size - 1) // WIDTH)
    a = tl.load(a_at + first, mask=a_live[:, None] & inside[None, :], other=0.0)
    b = tl.load(b_at + first, mask=inside[:, None] & b_live[None, :], other=0.0)
    if TALL:
        a = _exact(a, b.dtype, BITS)
    else:
        b = _exact(b, a.dtype, BITS)
    return acc + tl.dot(a, b, input_precision=PRECISION) * scale


@triton.jit(do_not_specialize=["rows"])
def group_fp8_kernel(
    x, weight, scale, y, rows, groups, outputs, size,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, TALL: tl.constexpr,
    BITS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows of BLOCK_N outputs; grid (outputs / BLOCK_N, groups, rows / BLOCK_T).

    A step of the loop is PARTS blocks of WIDTH inputs, 1 or 2, each with sums of its own: one product need not wait
    for the other. TALL: the weight is the long side of a product. BITS: see `_exact`.
    """
    group = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, WIDTH)
    m_n = n < outputs
    m_t = t < rows
    blocks = tl.cdiv(size, WIDTH)
    # outputs of a program are of one block
    scales = scale + (group * tl.cdiv(outputs, WIDTH) + tl.program_id(0) * BLOCK_N // WIDTH) * blocks
    w_rows = (group * outputs + n) * size
    x_rows = (t.to(tl.int64) * groups + group) * size
    if PDL:
        gdc_launch_dependents()
        cache_lines = tl.minimum(tl.arange(0, AHEAD) * WIDTH, size - 1)
        prefetch(weight + (group * outputs + tl.minimum(n, outputs - 1))[:, None] * size + cache_lines[None, :])
    if TALL:
        a_at = weight + w_rows[:, None] + k[None, :]
        b_at = x + x_rows[None, :] + k[:, None]
        a_live, b_live = m_n, m_t
        acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    else:
        a_at = x + x_rows[:, None] + k[None, :]
        b_at = weight + w_rows[None, :] + k[:, None]
        a_live, b_live = m_t, m_n
        acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc_two = acc
    if PDL:
        gdc_wait()
    for first in tl.range(0, size, PARTS * WIDTH, num_stages=STAGES):
        acc = _added(acc, a_at, b_at, scales, first, k, size, a_live, b_live, TALL, BITS, PRECISION)
        if PARTS == 2:
            acc_two = _added(acc_two, a_at, b_at, scales, first + WIDTH, k, size, a_live, b_live, TALL, BITS, PRECISION)
    if PARTS == 2:
        acc += acc_two
    if TALL:
        acc = tl.trans(acc)
    place = y + (t.to(tl.int64) * groups + group)[:, None] * outputs + n[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=m_t[:, None] & m_n[None, :])


@triton.jit
def written_out_kernel(
    weight, scale, numbers, outputs, size, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """numbers [G, outputs, size]: BLOCK_N outputs, which divide WIDTH, and WIDTH inputs of a group. The weight is
    nobody's output: nothing is waited for before it is read."""
    if PDL:
        gdc_launch_dependents()
    group = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = (group * outputs + n)[:, None] * size + k[None, :]
    live = (n < outputs)[:, None] & (k < size)[None, :]
    row = group * tl.cdiv(outputs, WIDTH) + tl.program_id(0) * BLOCK_N // WIDTH
    one = tl.load(scale + row * tl.num_programs(1) + tl.program_id(1))
    w = tl.load(weight + place, mask=live, other=0.0).to(tl.float32) * one
    if PDL:
        # What is written may stand where a kernel before still reads.
        gdc_wait()
    tl.store(numbers + place, w.to(numbers.dtype.element_ty), mask=live)


def _by_bits(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and not INTERPRETED and register_products(x.device)


def _stages(x: torch.Tensor, tile: GroupTile) -> int:
    """The depth at which the tile's pipeline fits: weights and rows of x, and beside them what sums pass through."""
    loaded = (tile.outputs + tile.rows * x.element_size()) * tile.inputs
    return fitting_stages(tile.stages, loaded, shared_bytes(x.device), 4 * tile.outputs * tile.rows)


def group_fp8(workspace: Workspace, x: torch.Tensor, weight: Fp8, tile: GroupTile) -> torch.Tensor:
    """`group_linear` of x [T, G·K], which is contiguous, and of scales for WIDTH by WIDTH."""
    groups, outputs, size = weight.shape
    rows = len(x)
    y = torch.empty(rows, groups * outputs, dtype=x.dtype, device=x.device)
    if rows:
        workspace.launch(group_fp8_kernel, tile.grid(rows, groups, outputs))(
            x, weight.data, weight.scale, y, rows, groups, outputs, size,
            BLOCK_T=tile.rows, BLOCK_N=tile.outputs, WIDTH=WIDTH, PARTS=tile.inputs // WIDTH, TALL=tile.rows >= LONG,
            BITS=_by_bits(x), STAGES=_stages(x, tile), AHEAD=AHEAD,
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32", PDL=workspace.pdl,
            launch_pdl=workspace.pdl, num_warps=4,
        )  # fmt: skip
    return y


def written_out(workspace: Workspace, weight: Fp8, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [G, R, K] in `dtype`, of scales for WIDTH by WIDTH."""
    groups, outputs, size = weight.shape
    numbers = torch.empty(groups, outputs, size, dtype=dtype, device=weight.data.device)
    workspace.launch(written_out_kernel, (cdiv(outputs, LONG), cdiv(size, WIDTH), groups))(
        weight.data, weight.scale, numbers, outputs, size,
        BLOCK_N=LONG, WIDTH=WIDTH, PDL=workspace.pdl, launch_pdl=workspace.pdl, num_warps=4,
    )  # fmt: skip
    return numbers
