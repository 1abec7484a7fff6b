# mypy: disable-error-code="no-untyped-def"
"""Feed-forward parts of chosen experts whose weights are packed integers or 4-bit floats: tiles of pairs that share an
expert, on tensor cores, with the weight read packed and on their long side (`kernels.linear.packed_rows`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.packed_rows import as_numbers, constants, held, inputs, numbers, shortcuts, times, width_of
from kernels.moe_gemm.pair_tiles import PairProducts, pair_products, pairs_at
from kernels.moe_gemm.rows import activate, bias_of
from kernels.moe_gemm.tiles import PairTile, _find, combined, cut
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv
from kernels.weight import Fp4, PackedInt
from kernels.workspace import Workspace


@triton.jit
def packed_up(
    x, xs, data, scale, zero, order_ptr, pairs, offsets, ends, h, num_experts, hidden, inter, C, B, G, limit, biases,
    SCALED: tl.constexpr, BIASED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    FLOAT: tl.constexpr,
    ORDER: tl.constexpr, EXACT: tl.constexpr, WORDS: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr,
    LIMITED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[pair, n] = act(g) ∘ u for ROWS pairs of one expert and BLOCK_N of its inner channels. SCALED: xs has a scale
    for each row of x. C: columns of a row of the weight, which are more than its inputs where some stand for none."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, start, stop = _find(offsets, ends, 0, tl.program_id(1), num_experts, 0, 1, False, ROWS, BLOCK_E)
    if expert >= num_experts:
        return
    place, pair = pairs_at(pairs, start, stop, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < inter
    gate_rows = expert.to(tl.int64) * 2 * inter + n
    x_rows = x + (pair // K)[:, None] * hidden
    columns = order_ptr + expert.to(tl.int64) * C if ORDER else order_ptr
    g = tl.zeros((BLOCK_N, ROWS), tl.float32)
    u = tl.zeros((BLOCK_N, ROWS), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    for first in tl.range(0, C, BLOCK_M, num_stages=STAGES):
        even, odd = inputs(x_rows, columns, first, C, True, ORDER, FLOAT, WORDS, BLOCK_M)
        one, two, left = numbers(
            data, scale, zero, first, gate_rows, live, B, G, BITS, GROUP, ZERO, FLOAT, BLOCK_N, BLOCK_M, dtype, EXACT
        )
        g += times(one, two, even, odd, FLOAT, PRECISION) * left[:, None]
        up_rows = gate_rows + inter
        one, two, left = numbers(
            data, scale, zero, first, up_rows, live, B, G, BITS, GROUP, ZERO, FLOAT, BLOCK_N, BLOCK_M, dtype, EXACT
        )
        u += times(one, two, even, odd, FLOAT, PRECISION) * left[:, None]
    if SCALED:
        sx = tl.load(xs + pair // K)[None, :]
        g *= sx
        u *= sx
    if BIASED:
        g += bias_of(biases, gate_rows, live)
        u += bias_of(biases, gate_rows + inter, live)
    y = tl.trans(activate(g, u, limit, ACT, LIMITED).to(dtype))
    tl.store(h + pair[:, None] * inter + n[None], y, mask=(place < stop)[:, None] & live[None])


@triton.jit
def packed_down(
    h, hs, data, scale, zero, order_ptr, weights, pairs, offsets, ends, y, num_experts, hidden, inter, C, B, G, biases,
    SCALED: tl.constexpr, BIASED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    FLOAT: tl.constexpr,
    ORDER: tl.constexpr, EXACT: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[pair, n], weighed, for ROWS pairs of one expert and BLOCK_N outputs. C as in `packed_up`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, start, stop = _find(offsets, ends, 0, tl.program_id(1), num_experts, 0, 1, False, ROWS, BLOCK_E)
    if expert >= num_experts:
        return
    place, pair = pairs_at(pairs, start, stop, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < hidden
    rows = expert.to(tl.int64) * hidden + n
    h_rows = h + pair[:, None] * inter
    columns = order_ptr + expert.to(tl.int64) * C if ORDER else order_ptr
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    dtype: tl.constexpr = h.dtype.element_ty
    for first in tl.range(0, C, BLOCK_M, num_stages=STAGES):
        even, odd = inputs(h_rows, columns, first, C, True, ORDER, FLOAT, WORDS, BLOCK_M)
        one, two, left = numbers(
            data, scale, zero, first, rows, live, B, G, BITS, GROUP, ZERO, FLOAT, BLOCK_N, BLOCK_M, dtype, EXACT
        )
        acc += times(one, two, even, odd, FLOAT, PRECISION) * left[:, None]
    if SCALED:
        acc *= tl.load(hs + pair)[None, :]
    if BIASED:
        acc += bias_of(biases, rows, live)
    out = tl.trans(acc) * tl.load(weights + pair)[:, None]
    tl.store(y + pair[:, None] * hidden + n[None], out.to(dtype), mask=(place < stop)[:, None] & live[None])


def packed_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: PackedInt | Fp4,
    down: PackedInt | Fp4,
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
    x, scales = as_numbers(workspace, x, gate_up)
    workspace.launch(packed_up, (cdiv(inter, up_tile.outputs), both.tiles))(
        x, scales, *held(gate_up), *both.places, h, count, hidden, inter, width_of(gate_up),
        gate_up.data.shape[-1], gate_up.scale.shape[-1], limit or 0.0, up_bias, SCALED=scales is not None,
        **constants(gate_up), **shortcuts(x, gate_up), K=experts.shape[1], ACT=activation, LIMITED=limit is not None,
        **both.constants, **cut(up_tile),
    )  # fmt: skip
    packed_second(workspace, h, down, weights, both, down_bias, y, down_tile)
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)


def packed_second(
    workspace: Workspace,
    h: torch.Tensor,
    table: PackedInt | Fp4,
    weights: torch.Tensor,
    both: PairProducts,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PairTile,
) -> None:
    """y [T · K, N] of each pair's row of h [T · K, inputs], weighed."""
    count, outputs, width = table.shape
    h, scales = as_numbers(workspace, h, table)
    workspace.launch(packed_down, (cdiv(outputs, tile.outputs), both.tiles))(
        h, scales, *held(table), weights, *both.places, y, count, outputs, width, width_of(table),
        table.data.shape[-1], table.scale.shape[-1], bias, SCALED=scales is not None, **constants(table),
        **shortcuts(h, table), **both.constants, **cut(tile),
    )  # fmt: skip
