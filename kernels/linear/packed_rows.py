# mypy: disable-error-code="no-untyped-def"
"""A Triton kernel for products of few rows with weights of packed integers and of 4-bit floats.

The product reads the weight packed. Integers less their zero points are exact in every dtype that products are taken
in. They are multiplied as they are where a tile's inputs share a scale, and scaled first where a tile holds several
groups; tensor cores have the weight on their long side. 4-bit floats are scaled first: the product of one and its
group's scale has six significant bits at most, which bfloat16 holds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.fp8_rows import RowTile, options, shared_tiles
from kernels.linear.skinny import INTERPRETED
from kernels.linear.slices import store_tile
from kernels.quantize.kernel import quantized
from kernels.round_fp4.kernel import round_fp4
from kernels.weight import Fp4, PackedInt
from kernels.workspace import Workspace

# Inputs of a tile.
WIDTH = 128


@triton.jit
def group_scales(scale, own, live, at, G, GROUP: tl.constexpr, BK: tl.constexpr):
    """Scales of 4-bit floats [BN, BK / GROUP] float32. Bytes are exponents (`kernels.weight.fp4`)."""
    group = at // GROUP + tl.arange(0, BK // GROUP)
    there = live[:, None] & (group < G)[None, :]
    if scale.dtype.element_ty == tl.uint8:
        byte = tl.load(scale + own[:, None] + group[None, :], mask=there, other=127).to(tl.int32)
        bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
        return bits.to(tl.float32, bitcast=True)
    return tl.load(scale + own[:, None] + group[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def e2m1(codes, EXACT: tl.constexpr):
    """Codes of 4-bit floats, uint8, as numbers: bfloat16, or float32 where the dtype asks for it (EXACT)."""
    if EXACT:
        q = codes.to(tl.int32)
        # Twice the magnitude is whole: the last bit alone, or behind a leading one, moved up by the exponent less one.
        twice = ((q & 1) | tl.where((q & 6) != 0, 2, 0)) << (tl.maximum((q & 7) >> 1, 1) - 1)
        number = 0.5 * tl.where((q & 8) != 0, -twice, twice).to(tl.float32)
    else:
        q = codes.to(tl.int16)
        # The exponent's two bits are the last of bfloat16's, whose numbers below the normal ones are e2m1's as well.
        bits = ((q & 7) << 6) | ((q & 8) << 12)
        number = bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37  # 2^126
    return number


@triton.jit
def numbers(data, scale, zero, at, n, live, B, G, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
            FLOAT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
            EXACT: tl.constexpr):  # fmt: skip
    """Rows n of a matrix of B bytes and G groups a row, inputs from `at` on, in DTYPE, and the scales [BN] that are
    still to be applied, which are none where a tile holds several groups. GROUP 0: one group.

    Integers come as [BN, BK], twice. FLOAT: numbers are e2m1, groups divide BK, and zero holds a factor a row, if there
    is one; they come as [BN, BK / 2] of even inputs and of odd ones, which stay where they were loaded. EXACT: floats
    go through float32, for an interpreter that shortcuts by bits are not for.
    """
    BYTES: tl.constexpr = BK * BITS // 8
    place = at * BITS // 8 + tl.arange(0, BYTES)
    mask = live[:, None] & (place < B)[None, :]
    packed = tl.load(data + n.to(tl.int64)[:, None] * B + place[None, :], mask=mask, other=0)
    own = n.to(tl.int64) * G
    # In one chain: the compiler goes on behind a return that stands within an if, where GROUPS may be 0.
    if FLOAT:
        each = group_scales(scale, own, live, at, G, GROUP, BK)
        WIDE: tl.constexpr = EXACT or tl.bfloat16 != DTYPE
        one = scaled(e2m1(packed & 15, WIDE), each, BN, BK // GROUP, DTYPE)
        two = scaled(e2m1(packed >> 4, WIDE), each, BN, BK // GROUP, DTYPE)
        if ZERO:
            left = tl.load(zero + n.to(tl.int64), mask=live, other=0.0)
        else:
            left = tl.full((BN,), 1.0, tl.float32)
    else:
        if BITS == 4:
            packed = tl.reshape(tl.join(packed & 15, packed >> 4), (BN, BK))
        q = packed.to(tl.int32)
        if GROUP == 0 or GROUP >= BK:
            group = 0 if GROUP == 0 else at // GROUP
            left = tl.load(scale + own + group, mask=live, other=0.0).to(tl.float32)
            if ZERO:
                q -= tl.load(zero + own + group, mask=live, other=0).to(tl.int32)[:, None]
            else:
                q -= 1 << (BITS - 1)
            one = q.to(tl.float32).to(DTYPE)
        else:
            GROUPS: tl.constexpr = BK // GROUP
            group = at // GROUP + tl.arange(0, GROUPS)
            there = live[:, None] & (group < G)[None, :]
            q = tl.reshape(q, (BN, GROUPS, GROUP))
            if ZERO:
                q -= tl.load(zero + own[:, None] + group[None, :], mask=there, other=0).to(tl.int32)[:, :, None]
            else:
                q -= 1 << (BITS - 1)
            each = tl.load(scale + own[:, None] + group[None, :], mask=there, other=0.0).to(tl.float32)
            one = tl.reshape(q.to(tl.float32) * each[:, :, None], (BN, BK)).to(DTYPE)
            left = tl.full((BN,), 1.0, tl.float32)
        two = one
    return one, two, left


@triton.jit
def scaled(w, each, BN: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr):
    """w [BN, …], whose runs of numbers share scales `each` [BN, GROUPS], in DTYPE: [BN, numbers]."""
    COUNT: tl.constexpr = w.numel // BN
    runs = tl.reshape(w, (BN, GROUPS, COUNT // GROUPS))
    # 16-bit numbers whose product with a scale of that dtype is rounded once; others are, from float32.
    if w.dtype == tl.float32:
        made = (runs * each.to(tl.float32)[:, :, None]).to(DTYPE)
    else:
        made = runs * each.to(w.dtype)[:, :, None]
    return tl.reshape(made, (BN, COUNT))


@triton.jit
def inputs(x_rows, columns, at, K, some, ORDER: tl.constexpr, FLOAT: tl.constexpr, WORDS: tl.constexpr,
           BK: tl.constexpr):  # fmt: skip
    """Inputs from `at` on of rows x_rows [BM, 1], zeros past the K-th: all [BM, BK], twice, or for a weight of floats
    even and odd ones [BM, BK / 2]. ORDER: `columns` says where each stands. WORDS: two follow each other in a word."""
    if not FLOAT:
        k = at + tl.arange(0, BK)
        where = tl.load(columns + k, mask=k < K, other=0) if ORDER else k
        even = tl.load(x_rows + where[None, :], mask=some & (k < K)[None, :], other=0.0)
        odd = even
    elif WORDS:
        k = at + 2 * tl.arange(0, BK // 2)
        words = (x_rows + at).to(tl.pointer_type(tl.int32)) + tl.arange(0, BK // 2)[None, :]
        both = tl.load(words, mask=some & (k < K)[None, :], other=0)
        even = both.to(tl.int16).to(x_rows.dtype.element_ty, bitcast=True)
        odd = (both >> 16).to(tl.int16).to(x_rows.dtype.element_ty, bitcast=True)
    else:
        k = at + 2 * tl.arange(0, BK // 2)
        even = tl.load(x_rows + k[None, :], mask=some & (k < K)[None, :], other=0.0)
        odd = tl.load(x_rows + k[None, :] + 1, mask=some & (k + 1 < K)[None, :], other=0.0)
    return even, odd


@triton.jit
def times(one, two, even, odd, FLOAT: tl.constexpr, DOT: tl.constexpr):
    """The product [BN, BM] of what `numbers` and `inputs` give."""
    made = tl.dot(one, tl.trans(even), input_precision=DOT)
    if FLOAT:
        made = tl.dot(two, tl.trans(odd), made, input_precision=DOT)
    return made


@triton.jit(do_not_specialize=["M"])
def packed_kernel(
    x_ptr, xs_ptr, data_ptr, scale_ptr, zero_ptr, order_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, B, G, x_stride, y_stride, residual_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, FLOAT: tl.constexpr, ORDER: tl.constexpr,
    EXACT: tl.constexpr, WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BM rows of BN outputs over a slice of K; grid (N/BN, M/BM, SPLIT). The last slice to finish sums all in order.

    With ACT, N counts outputs and the weight has 2N rows; SPLIT is 1 then. SCALED: xs has a scale for each row of x.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    live, some = n < N, m < M
    reach = tl.cdiv(K, BK * SPLIT) * BK
    start = tl.program_id(2) * reach
    stop = tl.minimum(start + reach, K)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = acc
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for at in tl.range(start, stop, BK, num_stages=STAGES):
        even, odd = inputs(x_rows, order_ptr, at, K, some[:, None], ORDER, FLOAT, WORDS, BK)
        one, two, left = numbers(
            data_ptr, scale_ptr, zero_ptr, at, n, live, B, G, BITS, GROUP, ZERO, FLOAT, BN, BK, dtype, EXACT
        )
        acc += times(one, two, even, odd, FLOAT, DOT) * left[:, None]
        if ACT is not None:
            one, two, left = numbers(
                data_ptr, scale_ptr, zero_ptr, at, n + N, live, B, G, BITS, GROUP, ZERO, FLOAT, BN, BK, dtype, EXACT
            )
            acc_up += times(one, two, even, odd, FLOAT, DOT) * left[:, None]
    if SCALED:
        sx = tl.load(xs_ptr + m, mask=some, other=0.0)[None, :]
        acc *= sx
        acc_up *= sx
    store_tile(
        acc, acc_up, n, m, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr, M, N, y_stride, residual_stride,
        SPLIT, ACT, BIAS, RESIDUAL,
    )  # fmt: skip


def packed_linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: PackedInt | Fp4,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: str | None,
    tile: RowTile,
    scales: torch.Tensor | None = None,
) -> None:
    """y [T, N] of x [T, K]; residual may be y. scales [T] are those of x's rows, where these are numbers."""
    (rows, n), k = y.shape, x.shape[1]
    exact = x.dtype == torch.float32
    partials, counts = shared_tiles(workspace, y, tile)
    workspace.launch(packed_kernel, tile.grid(y))(
        x, scales, *held(weight), bias, residual, y, partials, counts,
        rows, n, k, weight.data.shape[-1], weight.scale.shape[-1],
        x.stride(0), y.stride(0), 0 if residual is None else residual.stride(0),
        **constants(weight), **shortcuts(x, weight), SCALED=scales is not None,
        BK=WIDTH, STAGES=2 if exact else tile.stages, **options(workspace, x.dtype, bias, residual, activation, tile),
    )  # fmt: skip


def as_numbers(
    workspace: Workspace,
    x: torch.Tensor,
    weight: PackedInt | Fp4,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, K] as the product takes it, behind a norm if there is one, and the scale of each row [T] where inputs are
    rounded to 8 bits: numbers are then in x's dtype, which holds them exactly. What is not rounded is not normed."""
    if weight.rounding.number is None:
        return x, None
    if isinstance(weight, Fp4):
        return round_fp4(workspace, x, weight.rounding, norm_weight, eps, offset), None
    numbers, scales = quantized(workspace, x, weight.rounding, norm_weight, eps, offset)
    return numbers.to(x.dtype), scales[:, 0]


def shortcuts(x: torch.Tensor, weight: PackedInt | Fp4) -> dict[str, bool]:
    """How `numbers` and `inputs` read them: two inputs a word where rows of x, of 16 bits, begin at whole words."""
    exact = INTERPRETED or x.dtype == torch.float32
    words = x.dtype != torch.float32 and x.stride(0) % 2 == 0 and x.stride(-1) == 1 and x.shape[-1] % 2 == 0
    return {"EXACT": exact, "WORDS": words and x.data_ptr() % 4 == 0 and not constants(weight)["ORDER"]}


def held(weight: PackedInt | Fp4) -> tuple[torch.Tensor | None, ...]:
    """Data, scales, zero points or factors of rows, and the order of inputs, as kernels take them."""
    if isinstance(weight, Fp4):
        return weight.data, weight.scale, weight.factor, None
    return weight.data, weight.scale, weight.zero, weight.order


def width_of(weight: PackedInt | Fp4) -> int:
    """Of a row: what kernels count inputs by."""
    return weight.inputs if isinstance(weight, Fp4) else weight.columns


def constants(weight: PackedInt | Fp4) -> dict[str, Any]:
    """What kernels are made for. GROUP 0 is one for all inputs, others divide WIDTH or are whole multiples of it."""
    if isinstance(weight, Fp4):
        return {"BITS": 4, "GROUP": weight.group, "ZERO": weight.factor is not None, "FLOAT": True, "ORDER": False}
    return {
        "BITS": weight.bits,
        "GROUP": 0 if weight.group >= weight.columns else weight.group,
        "ZERO": weight.zero is not None,
        "FLOAT": False,
        "ORDER": weight.order is not None,
    }
