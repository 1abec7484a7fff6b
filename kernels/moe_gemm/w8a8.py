# mypy: disable-error-code="no-untyped-def"
"""Feed-forward parts of chosen experts whose weights are 8-bit floats or integers: tiles of pairs that share an expert,
on tensor cores. Inputs are quantized by a launch before each product, or taken as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.fp8_rows import GROUP, _product, tile_inputs
from kernels.moe_gemm.pair_tiles import PairProducts, pair_products, pairs_at
from kernels.moe_gemm.rows import activate, bias_of
from kernels.moe_gemm.tiles import PairTile, _find, combined, cut
from kernels.quantize.kernel import quantized
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv
from kernels.weight import Fp8, Int8, Weight
from kernels.weight.inputs import MX_GROUP
from kernels.workspace import Workspace


@triton.jit
def _scaled(acc, scales, xs, at, live, BLOCKED: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr):
    """acc [BN, ROWS] times the scales that no group had: of its outputs, and of its inputs at `at`."""
    if not BLOCKED:
        acc *= tl.load(scales, mask=live, other=0.0)[:, None]
    if not GROUPED and not WIDE:
        acc *= tl.load(xs + at)[None, :]
    return acc


@triton.jit(do_not_specialize=["xs_row", "xs_group"])
def w8a8_up(
    x, xs, data, ws, pairs, offsets, ends, h, num_experts, hidden, inter, xs_row, xs_group, ws_matrix, ws_row, limit,
    biases, BIASED: tl.constexpr, BLOCK: tl.constexpr, BLOCKED: tl.constexpr, GROUPED: tl.constexpr,
    WIDE: tl.constexpr, K: tl.constexpr,
    ACT: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[pair, n] = act(g) ∘ u for ROWS pairs of one expert and BLOCK_N of its inner channels. A scale is that of BLOCK
    outputs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, start, stop = _find(offsets, ends, 0, tl.program_id(1), num_experts, 0, 1, False, ROWS, BLOCK_E)
    if expert >= num_experts:
        return
    place, pair = pairs_at(pairs, start, stop, ROWS)
    token = pair // K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < inter
    m = tl.arange(0, BLOCK_M)
    number = expert.to(tl.int64)
    gate_rows = data + (number * 2 * inter + n[:, None]) * hidden + m[None]
    up_rows = gate_rows + inter.to(tl.int64) * hidden
    gate_scales = ws + number * ws_matrix + (n // BLOCK).to(tl.int64) * ws_row
    up_scales = ws + number * ws_matrix + ((n + inter) // BLOCK).to(tl.int64) * ws_row
    x_rows = x + token[:, None] * hidden + m[None]
    g = tl.zeros((BLOCK_N, ROWS), tl.float32)
    u = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for at in tl.range(0, hidden, BLOCK_M, num_stages=STAGES):
        inside = (at + m < hidden)[None]
        a = tl.load(x_rows + at, mask=inside, other=0.0)
        sx = tl.zeros((ROWS,), tl.float32)
        if GROUPED:
            sx = tl.load(xs + token * xs_row + at // BLOCK_M * xs_group)
        wg = tl.load(gate_rows + at, mask=inside & live[:, None], other=0.0)
        g += _product(wg, a, gate_scales, sx, at, live, BLOCK_M, BLOCKED, GROUPED, WIDE, PRECISION)
        wu = tl.load(up_rows + at, mask=inside & live[:, None], other=0.0)
        u += _product(wu, a, up_scales, sx, at, live, BLOCK_M, BLOCKED, GROUPED, WIDE, PRECISION)
    g = _scaled(g, gate_scales, xs, token * xs_row, live, BLOCKED, GROUPED, WIDE)
    u = _scaled(u, up_scales, xs, token * xs_row, live, BLOCKED, GROUPED, WIDE)
    if BIASED:
        g += bias_of(biases, number * 2 * inter + n, live)
        u += bias_of(biases, number * 2 * inter + inter + n, live)
    y = tl.trans(activate(g, u, limit, ACT, LIMITED).to(h.dtype.element_ty))
    tl.store(h + pair[:, None] * inter + n[None], y, mask=(place < stop)[:, None] & live[None])


@triton.jit(do_not_specialize=["hs_row", "hs_group"])
def w8a8_down(
    h, hs, data, ws, weights, pairs, offsets, ends, y, num_experts, hidden, inter, hs_row, hs_group, ws_matrix, ws_row,
    biases, BIASED: tl.constexpr, BLOCK: tl.constexpr, BLOCKED: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[pair, n], weighed, for ROWS pairs of one expert and BLOCK_N outputs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, start, stop = _find(offsets, ends, 0, tl.program_id(1), num_experts, 0, 1, False, ROWS, BLOCK_E)
    if expert >= num_experts:
        return
    place, pair = pairs_at(pairs, start, stop, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < hidden
    m = tl.arange(0, BLOCK_M)
    number = expert.to(tl.int64)
    rows = data + (number * hidden + n[:, None]) * inter + m[None]
    scales = ws + number * ws_matrix + (n // BLOCK).to(tl.int64) * ws_row
    h_rows = h + pair[:, None] * inter + m[None]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for at in tl.range(0, inter, BLOCK_M, num_stages=STAGES):
        inside = (at + m < inter)[None]
        a = tl.load(h_rows + at, mask=inside, other=0.0)
        sh = tl.zeros((ROWS,), tl.float32)
        if GROUPED:
            sh = tl.load(hs + pair * hs_row + at // BLOCK_M * hs_group)
        w = tl.load(rows + at, mask=inside & live[:, None], other=0.0)
        acc += _product(w, a, scales, sh, at, live, BLOCK_M, BLOCKED, GROUPED, WIDE, PRECISION)
    acc = _scaled(acc, scales, hs, pair * hs_row, live, BLOCKED, GROUPED, WIDE)
    if BIASED:
        acc += bias_of(biases, number * hidden + n, live)
    out = tl.trans(acc) * tl.load(weights + pair)[:, None]
    tl.store(
        y + pair[:, None] * hidden + n[None], out.to(y.dtype.element_ty), mask=(place < stop)[:, None] & live[None]
    )


def w8a8_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Fp8 | Int8,
    down: Fp8 | Int8,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    biases: ExpertBiases | None,
    rows: int,
    up_tile: PairTile,
    down_tile: PairTile,
) -> torch.Tensor:
    """`moe_gemm` by tiles of `rows` pairs."""
    x, experts = x.contiguous(), experts.contiguous()
    (_, hidden), (count, width, _) = x.shape, gate_up.shape
    inter = width // 2
    both = pair_products(workspace, x, experts, count, inter, biases, rows)
    h, y, (up_bias, down_bias) = both.h, both.y, both.biases
    numbers, scales, strides, constants = _inputs(workspace, x, gate_up)
    workspace.launch(w8a8_up, (cdiv(inter, up_tile.outputs), both.tiles))(
        numbers, scales, gate_up.data, gate_up.scale, *both.places, h, count, hidden, inter, *strides, limit or 0.0,
        up_bias, **constants, K=experts.shape[1], ACT=activation, LIMITED=limit is not None, **both.constants,
        **cut(replace(up_tile, inputs=tile_inputs(gate_up))),
    )  # fmt: skip
    w8a8_second(workspace, h, down, weights, both, down_bias, y, down_tile)
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)


def w8a8_second(
    workspace: Workspace,
    h: torch.Tensor,
    table: Fp8 | Int8,
    weights: torch.Tensor,
    both: PairProducts,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PairTile,
) -> None:
    """y [T · K, N] of each pair's row of h [T · K, inputs], weighed."""
    count, outputs, width = table.shape
    numbers, scales, strides, constants = _inputs(workspace, h, table)
    workspace.launch(w8a8_down, (cdiv(outputs, tile.outputs), both.tiles))(
        numbers, scales, table.data, table.scale, weights, *both.places, y, count, outputs, width, *strides, bias,
        **constants, **both.constants, **cut(replace(tile, inputs=tile_inputs(table))),
    )  # fmt: skip


def tiled(weight: Weight) -> bool:
    """Whether a tile's inputs have one scale for each output, and one for each row."""
    if not isinstance(weight, (Fp8, Int8)):
        return True
    width = tile_inputs(weight)
    return width in (GROUP, MX_GROUP) and weight.inputs.group in (0, width)


def _inputs(
    workspace: Workspace, x: torch.Tensor, weight: Fp8 | Int8
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...], dict[str, Any]]:
    """x as the product takes it, its scales, strides of the scales of both sides, and what is compiled in."""
    scales, wide = None, weight.inputs.number is None
    if not wide:
        x, scales = quantized(workspace, x, weight.inputs)
    strides = (0, 0) if scales is None else scales.stride()
    constants = {
        "BLOCK": weight.block[0],
        "BLOCKED": weight.scale.shape[-1] > 1 or weight.block[0] > 1,
        "GROUPED": scales is not None and scales.shape[1] > 1,
        "WIDE": wide,
    }
    return x, scales, (*strides, weight.scale.stride(0), weight.scale.stride(1)), constants
