# mypy: disable-error-code="no-untyped-def"
"""Many pairs: tiles of pairs that share an expert, on tensor cores.

Decode steps have few pairs an expert and are bound by reading weights: SWAP puts the weight on the tensor cores' long
side, so that 16 pairs fill the short one. Prompts are bound by arithmetic. TMA reads weights by the bulk copy engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.hardware import shared_bytes
from kernels.moe_gemm.order import Lists, Order
from kernels.moe_gemm.rows import activate, bias_of
from kernels.pipeline import fitting_stages
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace


@triton.jit
def _find_listed(counts, capacity, tile, num_experts, shared, parts, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """As `_find`, of `Lists` with `capacity` places each."""
    routed = num_experts - shared
    own = tile - shared * parts
    expert = tl.where(own < 0, routed + tile // parts, own)
    part = tl.where(own < 0, tile % parts, 0)
    if own >= routed:
        e = tl.arange(0, BLOCK_E)
        count = tl.load(counts + e, mask=e < routed, other=0)
        more = tl.cumsum(tl.maximum((count + ROWS - 1) // ROWS - 1, 0), 0)
        passed = more <= own - routed
        # when all have been passed, those that are no experts have been too
        expert = tl.sum(passed.to(tl.int32), 0)
        expert = tl.where(expert < routed, expert, num_experts)
        part = 1 + own - routed - tl.max(tl.where(passed, more, 0), 0)
    taken = tl.load(counts + tl.minimum(expert, num_experts - 1))
    first = expert * capacity
    return tl.where(part * ROWS < taken, expert, num_experts), first + part * ROWS, first + taken


@triton.jit
def _find(
    offsets, ends, capacity, tile, num_experts, shared, parts, LISTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The tile's expert (num_experts: there is no such tile), its first place and the end of the expert's places."""
    if LISTS:
        return _find_listed(ends, capacity, tile, num_experts, shared, parts, ROWS, BLOCK_E)
    e = tl.arange(0, BLOCK_E)
    upto = tl.load(ends + e, mask=e < num_experts, other=1 << 30)
    before = upto <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    started = tl.max(tl.where(before, upto, 0), 0)
    at = tl.minimum(expert, num_experts - 1)
    return expert, tl.load(offsets + at) + (tile - started) * ROWS, tl.load(offsets + at + 1)


@triton.jit(do_not_specialize=["capacity", "parts"])
def tiles_up(
    x,
    gate_up,
    order,
    offsets,
    ends,
    capacity,
    shared,
    parts,
    h,
    num_experts,
    hidden,
    inter,
    limit,
    biases,
    K: tl.constexpr,
    BIASED: tl.constexpr,
    LISTS: tl.constexpr,
    ACT: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """EVEN says that BLOCK_N divides the inner channels and BLOCK_M the inputs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, start, stop = _find(
        offsets, ends, capacity, tl.program_id(1), num_experts, shared, parts, LISTS, ROWS, BLOCK_E
    )
    if expert >= num_experts:
        return
    place = start + tl.arange(0, ROWS)
    # Rows past the expert's last pair repeat it and are not stored.
    pair = tl.load(order + tl.minimum(place, stop - 1)).to(tl.int64)
    token = pair // K
    first_n = tl.program_id(0) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    matrix = expert.to(tl.int64) * 2 * inter
    if not TMA:
        gate_rows = gate_up + (matrix + n[:, None]) * hidden + m[None]
        up_rows = gate_rows + inter.to(tl.int64) * hidden
    x_rows = x + token[:, None] * hidden + m[None]
    g = tl.zeros((BLOCK_N, ROWS) if SWAP else (ROWS, BLOCK_N), tl.float32)
    u = tl.zeros((BLOCK_N, ROWS) if SWAP else (ROWS, BLOCK_N), tl.float32)
    for first in tl.range(0, hidden, BLOCK_M, num_stages=STAGES):
        inside = first + m[None] < hidden
        if EVEN:
            a = tl.load(x_rows + first)
        else:
            a = tl.load(x_rows + first, mask=inside, other=0.0)
        if TMA:
            wg = gate_up.load([(matrix + first_n).to(tl.int32), first])
            wu = gate_up.load([(matrix + inter + first_n).to(tl.int32), first])
        elif EVEN:
            wg = tl.load(gate_rows + first)
            wu = tl.load(up_rows + first)
        else:
            wg = tl.load(gate_rows + first, mask=inside & (n < inter)[:, None], other=0.0)
            wu = tl.load(up_rows + first, mask=inside & (n < inter)[:, None], other=0.0)
        if SWAP:
            g = tl.dot(wg, tl.trans(a), g, input_precision=PRECISION)
            u = tl.dot(wu, tl.trans(a), u, input_precision=PRECISION)
        else:
            g = tl.dot(a, tl.trans(wg), g, input_precision=PRECISION)
            u = tl.dot(a, tl.trans(wu), u, input_precision=PRECISION)
    if BIASED:
        gate_bias, up_bias = bias_of(biases, matrix + n, n < inter), bias_of(biases, matrix + inter + n, n < inter)
        g += gate_bias if SWAP else tl.trans(gate_bias)
        u += up_bias if SWAP else tl.trans(up_bias)
    y = activate(g, u, limit, ACT, LIMITED).to(h.dtype.element_ty)
    if SWAP:
        y = tl.trans(y)
    tl.store(h + pair[:, None] * inter + n[None], y, mask=(place < stop)[:, None] & (n < inter)[None])


@triton.jit(do_not_specialize=["capacity", "parts"])
def tiles_down(
    h,
    down,
    weights,
    order,
    offsets,
    ends,
    capacity,
    shared,
    parts,
    y,
    num_experts,
    hidden,
    inter,
    biases,
    BIASED: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[pair] = weight · down[e] · h[pair]. EVEN says that BLOCK_N divides the outputs and BLOCK_M the inputs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, start, stop = _find(
        offsets, ends, capacity, tl.program_id(1), num_experts, shared, parts, LISTS, ROWS, BLOCK_E
    )
    if expert >= num_experts:
        return
    place = start + tl.arange(0, ROWS)
    pair = tl.load(order + tl.minimum(place, stop - 1)).to(tl.int64)
    first_n = tl.program_id(0) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    matrix = expert.to(tl.int64) * hidden
    if not TMA:
        rows = down + (matrix + n[:, None]) * inter + m[None]
    h_rows = h + pair[:, None] * inter + m[None]
    acc = tl.zeros((BLOCK_N, ROWS) if SWAP else (ROWS, BLOCK_N), tl.float32)
    for first in tl.range(0, inter, BLOCK_M, num_stages=STAGES):
        inside = first + m[None] < inter
        if EVEN:
            a = tl.load(h_rows + first)
        else:
            a = tl.load(h_rows + first, mask=inside, other=0.0)
        if TMA:
            w = down.load([(matrix + first_n).to(tl.int32), first])
        elif EVEN:
            w = tl.load(rows + first)
        else:
            w = tl.load(rows + first, mask=inside & (n < hidden)[:, None], other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(a), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    if BIASED:
        acc += tl.trans(bias_of(biases, matrix + n, n < hidden))
    acc *= tl.load(weights + pair)[:, None]
    tl.store(
        y + pair[:, None] * hidden + n[None],
        acc.to(y.dtype.element_ty),
        mask=(place < stop)[:, None] & (n < hidden)[None],
    )


@triton.jit
def combine(
    y,
    rows,
    experts,
    weights,
    residual,
    out,
    num_experts,
    hidden,
    K: tl.constexpr,
    PLACED: tl.constexpr,
    WHOLE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = residual[t] + Σ y of its pairs, in turn. PLACED: a pair stands in its row (−1: nowhere) and has yet to
    be weighed, else it stands at its own number, if its expert is one of these, as WHOLE says of all."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(K):
        pair = t * K + k
        if PLACED:
            row = tl.load(rows + pair).to(tl.int64)
            width = tl.where(row >= 0, hidden, 0)
            # read once: the cache keeps the residual and what is written for the next kernel
            part = tl.load(y + row * hidden + n, mask=n < width, other=0.0, eviction_policy="evict_first")
            total += part.to(tl.float32) * tl.load(weights + pair)
        else:
            width = hidden
            if not WHOLE:
                expert = tl.load(experts + pair)
                width = tl.where((expert >= 0) & (expert < num_experts), hidden, 0)
            total += tl.load(y + pair * hidden + n, mask=n < width, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + t * hidden + n, mask=n < hidden, other=0.0).to(tl.float32)
    tl.store(out + t * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)


def combined(
    workspace: Workspace,
    y: torch.Tensor,
    rows: torch.Tensor | None,
    experts: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    num_experts: int,
    dtype: torch.dtype,
    whole: bool = False,
) -> torch.Tensor:
    """[T, hidden] from the pairs' summands y, weighed already unless `rows` says where they stand. whole: every pair's
    expert is one of these."""
    (t, k), hidden = experts.shape, y.shape[1]
    out = torch.empty(t, hidden, dtype=dtype, device=y.device)
    width = 256 if t <= 256 else 1024
    workspace.launch(combine, (t, cdiv(hidden, width)))(
        y, experts if rows is None else rows, experts, weights, residual, out, num_experts, hidden, K=k,
        PLACED=rows is not None, WHOLE=whole, RESIDUAL=residual is not None, BLOCK_N=width,
        PDL=workspace.pdl, launch_pdl=workspace.pdl,
        num_warps=width // 128,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class PairTile:
    """How a grouped product is cut: outputs and inputs a tile, pipeline depth where it fits, warps; see the module for
    the rest."""

    outputs: int
    inputs: int
    stages: int
    warps: int
    swap: bool = False
    tma: bool = False


def cut(tile: PairTile) -> dict[str, int]:
    """What a kernel of quantized experts is compiled for."""
    return {
        "BLOCK_N": tile.outputs,
        "BLOCK_M": tile.inputs,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def _stages(x: torch.Tensor, tile: PairTile, rows: int, matrices: int) -> int:
    """The depth at which the pipeline of a tile of `rows` pairs fits, which reads so many matrices of an expert."""
    loaded = (rows + matrices * tile.outputs) * tile.inputs * x.element_size()
    return fitting_stages(tile.stages, loaded, shared_bytes(x.device))


def _matrix(table: torch.Tensor, tile: PairTile) -> Any:
    """A table of experts' matrices as the kernel takes it."""
    if not tile.tma:
        return table
    flat = table.flatten(0, 1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [tile.outputs, tile.inputs])


def tiles_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    places: Order | Lists,
    up_tile: PairTile,
    down_tile: PairTile,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """`moe_gemm` by the tiles of `places`.

    Every shape that a launch depends on is known to the host, so that graphs can hold it.
    """
    (t, hidden), k = x.shape, experts.shape[1]
    h = torch.empty(t * k, gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
    y = torch.empty(t * k, hidden, dtype=x.dtype, device=x.device)
    cuts = (places, up_tile, down_tile, biases)
    tile_products(workspace, x, gate_up, down, weights, h, y, activation, limit, *cuts)
    return combined(workspace, y, None, experts, weights, residual, len(gate_up), x.dtype, isinstance(places, Lists))


def tile_products(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    h: torch.Tensor,
    y: torch.Tensor,
    activation: str,
    limit: float | None,
    places: Order | Lists,
    up_tile: PairTile,
    down_tile: PairTile,
    biases: ExpertBiases | None = None,
) -> None:
    """h [T·K, F] and y [T·K, M] of the pairs of `places`, by pair: what is between the products, and the summands of
    the output."""
    e, (pairs, inter), (t, hidden) = len(gate_up), h.shape, x.shape
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]
    if isinstance(places, Lists):
        lists = places
        where = (lists.pairs, lists.counts, lists.counts, lists.pairs.shape[1], lists.shared, lists.parts)
    else:
        where = (places.order, places.offsets, places.ends, 0, 0, 1)
    same: dict[str, Any] = {
        "LISTS": isinstance(places, Lists),
        "ROWS": places.rows,
        "BLOCK_E": next_power_of_2(e),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "PDL": workspace.pdl,
        "launch_pdl": workspace.pdl,
    }
    tile = up_tile
    workspace.launch(tiles_up, (cdiv(inter, tile.outputs), places.tiles))(
        x, _matrix(gate_up, tile), *where, h, e, hidden, inter, limit or 0.0,
        None if biases is None else biases.gate_up, BIASED=biases is not None, K=pairs // t, ACT=activation,
        LIMITED=limit is not None, BLOCK_N=tile.outputs, BLOCK_M=tile.inputs, STAGES=_stages(x, tile, places.rows, 2),
        SWAP=tile.swap, TMA=tile.tma, EVEN=inter % tile.outputs == 0 and hidden % tile.inputs == 0,
        num_warps=tile.warps, **same,
    )  # fmt: skip
    tile = down_tile
    workspace.launch(tiles_down, (cdiv(hidden, tile.outputs), places.tiles))(
        h, _matrix(down, tile), weights, *where, y, e, hidden, inter,
        None if biases is None else biases.down, BIASED=biases is not None,
        BLOCK_N=tile.outputs, BLOCK_M=tile.inputs, STAGES=_stages(x, tile, places.rows, 1),
        SWAP=tile.swap, TMA=tile.tma, EVEN=hidden % tile.outputs == 0 and inter % tile.inputs == 0,
        num_warps=tile.warps, **same,
    )  # fmt: skip
