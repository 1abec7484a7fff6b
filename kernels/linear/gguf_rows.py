# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for weights in blocks of GGUF files: the product of few rows, which reads them packed, and a weight's
numbers, for products of many rows and for embeddings.

Each number of a tile is taken out of its bytes where the block's layout (`kernels.weight.gguf`) has them, scaled in
float32 and rounded once to the dtype that products are taken in; tensor cores have the weight on their long side.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.fp8_rows import RowTile, options, shared_tiles
from kernels.linear.slices import store_tile
from kernels.sizes import cdiv
from kernels.weight import GgufBlocks
from kernels.weight.gguf import FORMATS, IQ4_VALUES
from kernels.workspace import Workspace

# Inputs of a tile: a block is a whole number of tiles, or a tile a whole number of blocks.
WIDTH = 128
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _word(values: tuple[int, ...]) -> int:
    """Eight signed bytes, the first lowest, as a signed number of 64 bits."""
    return int.from_bytes(bytes(value & 255 for value in values), "little", signed=True)


FIRST_VALUES, LAST_VALUES = tl.constexpr(_word(IQ4_VALUES[:8])), tl.constexpr(_word(IQ4_VALUES[8:]))


@triton.jit
def _byte(data, at, there):
    return tl.load(data + at, mask=there, other=0).to(tl.int32)


@triton.jit
def _signed(q):
    """Bytes 0 to 255 as numbers from -128 on."""
    return q - ((q & 128) << 1)


@triton.jit
def _half(half, at, there):
    """The 16-bit float at byte `at` (even) of the data."""
    return tl.load(half + at // 2, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _iq4(q):
    word = tl.where(q < 8, tl.full((), FIRST_VALUES, tl.int64), tl.full((), LAST_VALUES, tl.int64))
    return _signed((word >> ((q & 7) * 8)).to(tl.int32) & 255)


@triton.jit
def _quants(data, base, i, there, FORMAT: tl.constexpr):
    """Numbers i of the blocks at byte `base`, less their zero point, int32."""
    if FORMAT == "Q4_0":
        q = (_byte(data, base + 2 + i % 16, there) >> (i // 16 * 4) & 15) - 8
    elif FORMAT == "Q4_1":
        q = _byte(data, base + 4 + i % 16, there) >> (i // 16 * 4) & 15
    elif FORMAT == "Q5_0":
        high = _byte(data, base + 2 + i // 8, there) >> (i % 8) & 1
        q = (_byte(data, base + 6 + i % 16, there) >> (i // 16 * 4) & 15 | high << 4) - 16
    elif FORMAT == "Q5_1":
        high = _byte(data, base + 4 + i // 8, there) >> (i % 8) & 1
        q = _byte(data, base + 8 + i % 16, there) >> (i // 16 * 4) & 15 | high << 4
    elif FORMAT == "Q8_0":
        q = _signed(_byte(data, base + 2 + i, there))
    elif FORMAT == "IQ4_NL":
        q = _iq4(_byte(data, base + 2 + i % 16, there) >> (i // 16 * 4) & 15)
    elif FORMAT == "IQ4_XS":
        q = _iq4(_byte(data, base + 8 + i // 32 * 16 + i % 16, there) >> (i % 32 // 16 * 4) & 15)
    elif FORMAT == "Q2_K":
        q = _byte(data, base + 16 + i // 128 * 32 + i % 32, there) >> (i % 128 // 32 * 2) & 3
    elif FORMAT == "Q3_K":
        low = _byte(data, base + 32 + i // 128 * 32 + i % 32, there) >> (i % 128 // 32 * 2) & 3
        q = low - 4 * (1 - (_byte(data, base + i % 32, there) >> (i // 32) & 1))
    elif FORMAT == "Q4_K":
        q = _byte(data, base + 16 + i // 64 * 32 + i % 32, there) >> (i % 64 // 32 * 4) & 15
    elif FORMAT == "Q5_K":
        high = _byte(data, base + 16 + i % 32, there) >> (i // 32) & 1
        q = _byte(data, base + 48 + i // 64 * 32 + i % 32, there) >> (i % 64 // 32 * 4) & 15 | high << 4
    else:
        tl.static_assert(FORMAT == "Q6_K")
        low = _byte(data, base + i // 128 * 64 + i % 64, there) >> (i % 128 // 64 * 4) & 15
        high = _byte(data, base + 128 + i // 128 * 32 + i % 32, there) >> (i % 128 // 32 * 2) & 3
        q = (low | high << 4) - 32
    return q


@triton.jit
def _scales(data, half, base, g, there, FORMAT: tl.constexpr):
    """Of groups g of the blocks at byte `base`: what their numbers are multiplied by, and what is added then."""
    added = tl.zeros(base.shape, tl.float32)
    if FORMAT == "Q4_1" or FORMAT == "Q5_1":
        scale = _half(half, base, there)
        added = _half(half, base + 2, there)
    elif FORMAT == "IQ4_XS":
        low = _byte(data, base + 4 + g // 2, there) >> (g % 2 * 4) & 15
        high = _byte(data, base + 2 + g // 4, there) >> (g % 4 * 2) & 3
        scale = _half(half, base, there) * ((low | high << 4) - 32).to(tl.float32)
    elif FORMAT == "Q2_K":
        both = _byte(data, base + g, there)
        scale = _half(half, base + 80, there) * (both & 15).to(tl.float32)
        added = -_half(half, base + 82, there) * (both >> 4).to(tl.float32)
    elif FORMAT == "Q3_K":
        low = _byte(data, base + 96 + g % 8, there) >> (g // 8 * 4) & 15
        high = _byte(data, base + 104 + g % 4, there) >> (g // 4 * 2) & 3
        scale = _half(half, base + 108, there) * ((low | high << 4) - 32).to(tl.float32)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        # Six bits each: of the first four groups in a byte of their own, of the others parted.
        first = _byte(data, base + 4 + g % 4, there)
        second = _byte(data, base + 8 + g % 4, there)
        third = _byte(data, base + 12 + g % 4, there)
        times = tl.where(g < 4, first & 63, third & 15 | first >> 6 << 4)
        least = tl.where(g < 4, second & 63, third >> 4 | second >> 6 << 4)
        scale = _half(half, base, there) * times.to(tl.float32)
        added = -_half(half, base + 2, there) * least.to(tl.float32)
    elif FORMAT == "Q6_K":
        scale = _half(half, base + 208, there) * _signed(_byte(data, base + 192 + g, there)).to(tl.float32)
    else:
        scale = _half(half, base, there)
    return scale, added


@triton.jit
def block_numbers(data, half, row, at, live, K, FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
                  GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Inputs [at, at + BK) of the rows that begin at byte `row` [BN]: [BN, BK] float32, nothing where they end. Plain
    formats have data of their own dtype, and `row` counts its numbers."""
    k = at + tl.arange(0, BK)
    there = live[:, None] & (k < K)[None, :]
    # In one chain, for the compiler goes on behind a return that stands within an if.
    if VALUES == 1:
        w = tl.load(data + row[:, None] + k[None, :], mask=there, other=0.0).to(tl.float32)
    else:
        GROUPS: tl.constexpr = BK // GROUP
        q = _quants(data, row[:, None] + (k // VALUES * SIZE)[None, :], (k % VALUES)[None, :], there, FORMAT)
        first = at + tl.arange(0, GROUPS) * GROUP
        inside = live[:, None] & (first < K)[None, :]
        scale, added = _scales(
            data, half, row[:, None] + (first // VALUES * SIZE)[None, :], (first % VALUES // GROUP)[None, :], inside,
            FORMAT,
        )  # fmt: skip
        wide = tl.reshape(q.to(tl.float32), (BN, GROUPS, GROUP))
        w = tl.reshape(wide * scale[:, :, None] + added[:, :, None], (BN, BK))
    return w


@triton.jit(do_not_specialize=["M"])
def gguf_kernel(
    x_ptr, data_ptr, half_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, B, x_stride, y_stride, residual_stride,
    FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BM rows of BN outputs over a slice of K; grid (N/BN, M/BM, SPLIT). The last slice to finish sums all in order.

    With ACT, N counts outputs and the weight has 2N rows; SPLIT is 1 then.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    live, some = n < N, m < M
    reach = tl.cdiv(K, BK * SPLIT) * BK
    start = tl.program_id(2) * reach
    stop = tl.minimum(start + reach, K)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    row = n.to(tl.int64) * B
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = acc
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for at in tl.range(start, stop, BK, num_stages=STAGES):
        inside = at + k < K
        x = tl.load(x_rows + (at + k)[None, :], mask=some[:, None] & inside[None, :], other=0.0)
        w = block_numbers(data_ptr, half_ptr, row, at, live, K, FORMAT, VALUES, SIZE, GROUP, BN, BK)
        acc += tl.dot(w.to(dtype), tl.trans(x), input_precision=DOT)
        if ACT is not None:
            up_row = (n + N).to(tl.int64) * B
            w = block_numbers(data_ptr, half_ptr, up_row, at, live, K, FORMAT, VALUES, SIZE, GROUP, BN, BK)
            acc_up += tl.dot(w.to(dtype), tl.trans(x), input_precision=DOT)
    store_tile(
        acc, acc_up, n, m, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr, M, N, y_stride, residual_stride,
        SPLIT, ACT, BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def numbers_kernel(
    ids_ptr, data_ptr, half_ptr, w_ptr, N, R, K, B, w_stride, factor,
    FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    IDS: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """w [N, K]: a tile of rows 0 to N of the weight's R, or of rows `ids`, times the factor behind rounding. A row that
    is not there is zero."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.program_id(1) * BK
    live = n < N
    k = at + tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = tl.load(ids_ptr + n, mask=live, other=0).to(tl.int64) if IDS else n.to(tl.int64)
    held = live & (source >= 0) & (source < R)
    w = block_numbers(data_ptr, half_ptr, source * B, at, held, K, FORMAT, VALUES, SIZE, GROUP, BN, BK)
    w = w.to(w_ptr.dtype.element_ty)
    if SCALED:
        w = (w.to(tl.float32) * factor).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + n.to(tl.int64)[:, None] * w_stride + k[None, :], w, mask=live[:, None] & (k < K)[None, :])


def rows_product(
    workspace: Workspace,
    x: torch.Tensor,
    part: torch.Tensor,
    name: str,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: str | None,
    tile: RowTile,
) -> None:
    """y [T, N] of x [T, K] and rows `part` in one format; y's and residual's rows may be strided, residual may be y."""
    (rows, n), k = y.shape, x.shape[1]
    partials, counts = shared_tiles(workspace, y, tile)
    workspace.launch(gguf_kernel, tile.grid(y))(
        x, *views(part, name), bias, residual, y, partials, counts,
        rows, n, k, stride(part, name), x.stride(0), y.stride(0), 0 if residual is None else residual.stride(0),
        **constants(name),
        BK=WIDTH, STAGES=tile.stages, **options(workspace, x.dtype, bias, residual, activation, tile),
    )  # fmt: skip


def write_numbers(
    workspace: Workspace,
    part: torch.Tensor,
    name: str,
    w: torch.Tensor,
    ids: torch.Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """w [N, K] takes the numbers of `part`'s rows, or of its rows `ids` [N], in w's dtype."""
    n, k = w.shape
    if not n:
        return
    height = 16 if ids is not None else 64
    workspace.launch(numbers_kernel, (cdiv(n, height), cdiv(k, WIDTH)))(
        ids, *views(part, name), w, n, len(part), k, stride(part, name), w.stride(0), factor, **constants(name),
        IDS=ids is not None, SCALED=factor != 1.0, BN=height, BK=WIDTH, PDL=workspace.pdl, launch_pdl=workspace.pdl,
        num_warps=4,
    )  # fmt: skip


def unpacked(workspace: Workspace, weight: GgufBlocks, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [N, K] of a matrix in `dtype`."""
    w = torch.empty(weight.shape, dtype=dtype, device=weight.parts[0].device)
    start = 0
    for part, name in zip(weight.parts, weight.formats, strict=True):
        write_numbers(workspace, part, name, w[start : start + len(part)])
        start += len(part)
    return w


def views(part: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A part's bytes, and the same as 16-bit floats; of a plain format its numbers."""
    if name in PLAIN:
        return part.view(PLAIN[name]), None
    return part, part.view(torch.float16)


def stride(part: torch.Tensor, name: str) -> int:
    """Of a row, as kernels count it."""
    return part.shape[-1] // (PLAIN[name].itemsize if name in PLAIN else 1)


def constants(name: str) -> dict[str, Any]:
    """What kernels are made for."""
    form = FORMATS[name]
    plain = name in PLAIN
    return {
        "FORMAT": "plain" if plain else name,
        "VALUES": form.num_values,
        "SIZE": form.num_bytes,
        "GROUP": 16 if name in ("Q2_K", "Q3_K", "Q6_K") else 32,
    }
