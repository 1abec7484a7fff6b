# mypy: disable-error-code="no-untyped-def"
"""Feed-forward parts of chosen experts whose weights are blocks of GGUF files: tiles of pairs that share an expert, on
tensor cores, with the weight read packed and on their long side (`kernels.linear.gguf_blocks`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.gguf_blocks import WIDTH, block_numbers, constants, stride, views
from kernels.moe_gemm.pair_tiles import pair_products, pairs_at
from kernels.moe_gemm.rows import activate, bias_of
from kernels.moe_gemm.tiles import _find, combined
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv
from kernels.weight import GgufBlocks
from kernels.workspace import Workspace

# Outputs of a tile.
OUTPUTS = 64


@triton.jit
def gguf_up(
    x, gate, gate_shorts, up, up_shorts, pairs, offsets, ends, h, num_experts, hidden, inter,
    gate_rows, up_rows, up_first, GATE_B, UP_B, limit, biases,
    BIASED: tl.constexpr, GATE: tl.constexpr, GATE_VALUES: tl.constexpr, GATE_SIZE: tl.constexpr,
    GATE_GROUP: tl.constexpr,
    UP: tl.constexpr, UP_VALUES: tl.constexpr, UP_SIZE: tl.constexpr, UP_GROUP: tl.constexpr,
    K: tl.constexpr, ACT: tl.constexpr, LIMITED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[pair, n] = act(g) ∘ u for ROWS pairs of one expert and BLOCK_N of its inner channels.

    Tables of gate and up have gate_rows and up_rows an expert, up's from up_first on: they are one table, or two in
    formats of their own."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, start, stop = _find(offsets, ends, 0, tl.program_id(1), num_experts, 0, 1, False, ROWS, BLOCK_E)
    if expert >= num_experts:
        return
    place, pair = pairs_at(pairs, start, stop, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < inter
    m = tl.arange(0, BLOCK_M)
    gate_row = (expert.to(tl.int64) * gate_rows + n) * GATE_B
    up_row = (expert.to(tl.int64) * up_rows + up_first + n) * UP_B
    x_rows = x + (pair // K)[:, None] * hidden
    g = tl.zeros((BLOCK_N, ROWS), tl.float32)
    u = tl.zeros((BLOCK_N, ROWS), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    for first in tl.range(0, hidden, BLOCK_M, num_stages=STAGES):
        inside = first + m < hidden
        a = tl.trans(tl.load(x_rows + (first + m)[None, :], mask=inside[None, :], other=0.0))
        w = block_numbers(
            gate, gate_shorts, gate_row, first, live, hidden, GATE, GATE_VALUES, GATE_SIZE, GATE_GROUP, BLOCK_N, BLOCK_M
        )
        g += tl.dot(w.to(dtype), a, input_precision=PRECISION)
        w = block_numbers(
            up, up_shorts, up_row, first, live, hidden, UP, UP_VALUES, UP_SIZE, UP_GROUP, BLOCK_N, BLOCK_M
        )
        u += tl.dot(w.to(dtype), a, input_precision=PRECISION)
    if BIASED:
        first_row = expert.to(tl.int64) * 2 * inter
        g += bias_of(biases, first_row + n, live)
        u += bias_of(biases, first_row + inter + n, live)
    y = tl.trans(activate(g, u, limit, ACT, LIMITED).to(dtype))
    tl.store(h + pair[:, None] * inter + n[None], y, mask=(place < stop)[:, None] & live[None])


@triton.jit
def gguf_down(
    h, data, shorts, weights, pairs, offsets, ends, y, num_experts, hidden, inter, B, biases,
    BIASED: tl.constexpr, FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
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
    row = (expert.to(tl.int64) * hidden + n) * B
    h_rows = h + pair[:, None] * inter
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    dtype: tl.constexpr = h.dtype.element_ty
    for first in tl.range(0, inter, BLOCK_M, num_stages=STAGES):
        inside = first + m < inter
        a = tl.trans(tl.load(h_rows + (first + m)[None, :], mask=inside[None, :], other=0.0))
        w = block_numbers(data, shorts, row, first, live, inter, FORMAT, VALUES, SIZE, GROUP, BLOCK_N, BLOCK_M)
        acc += tl.dot(w.to(dtype), a, input_precision=PRECISION)
    if BIASED:
        acc += bias_of(biases, expert.to(tl.int64) * hidden + n, live)
    out = tl.trans(acc) * tl.load(weights + pair)[:, None]
    tl.store(y + pair[:, None] * hidden + n[None], out.to(dtype), mask=(place < stop)[:, None] & live[None])


def gguf_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: GgufBlocks,
    down: GgufBlocks,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    biases: ExpertBiases | None,
    rows: int,
) -> torch.Tensor:
    """`moe_gemm` by tiles of `rows` pairs. gate_up has one part, or one for gate and one for up; down has one."""
    x, experts = x.contiguous(), experts.contiguous()
    (_, hidden), (count, width, _) = x.shape, gate_up.shape
    inter = width // 2
    both = pair_products(workspace, x, experts, count, inter, biases, rows)
    h, y, (up_bias, down_bias) = both.h, both.y, both.biases
    same = {
        **both.constants,
        "BLOCK_N": OUTPUTS,
        "BLOCK_M": WIDTH,
        "STAGES": 2 if x.dtype == torch.float32 else 3,
        "num_warps": 4,
    }
    gate, up = gate_up.parts[0], gate_up.parts[-1]
    first, last, (own,) = gate_up.formats[0], gate_up.formats[-1], down.formats
    of_gate, of_up = constants(first), constants(last)
    halves = {
        **{"GATE" + ("" if key == "FORMAT" else f"_{key}"): value for key, value in of_gate.items()},
        **{"UP" + ("" if key == "FORMAT" else f"_{key}"): value for key, value in of_up.items()},
    }
    workspace.launch(gguf_up, (cdiv(inter, OUTPUTS), both.tiles))(
        x, *views(gate, first), *views(up, last), *both.places, h, count, hidden, inter,
        gate.shape[1], up.shape[1], up.shape[1] - inter, stride(gate, first), stride(up, last), limit or 0.0,
        up_bias, **halves, K=experts.shape[1], ACT=activation, LIMITED=limit is not None, **same,
    )  # fmt: skip
    workspace.launch(gguf_down, (cdiv(hidden, OUTPUTS), both.tiles))(
        h, *views(down.parts[0], own), weights, *both.places, y, count, hidden, inter, stride(down.parts[0], own),
        down_bias, **constants(own), **same,
    )  # fmt: skip
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)
