# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of a decode step's pairs with their experts' matrices on Hopper, in Gluon: weights are asked for ahead.

A tile is up to ROWS pairs of one expert by some rows of its matrix, which are the long side of the matrix unit. Tiles
of shared experts and first tiles of the others are numbered first (`order.Lists`) and taken first, the former evenly
among the latter, so a program knows its expert before anything is chosen: while the choice is made, the bulk copy
engine (TMA) fills a ring in shared memory. Programs of the down product find their pairs and fill their rings while
the up product ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import group_products
from kernels.hopper.boxes import boxes
from kernels.hopper.compat import load_pointers, sync
from kernels.hopper.epilogue import activate, limited
from kernels.hopper.mma import weight_product
from kernels.hopper.ring import barriers, load_weights
from kernels.hopper.schedule import plus
from kernels.moe_gemm.order import Lists
from kernels.moe_gemm.tiles import combined
from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace


@gluon.jit
def _spread(tile, column, num_experts, shared, parts):
    """The tile and the column of its expert's matrix that a program takes: tiles of shared experts stand evenly among
    first tiles, parts of one side by side. Programs that read what others have read already leave memory to others."""
    columns = gl.num_programs(0)
    own, rest = shared * parts * columns, (num_experts - shared) * columns
    at = tile * columns + column
    passed = at * own // gl.maximum(own + rest, 1)
    is_shared = (at + 1) * own // gl.maximum(own + rest, 1) > passed
    first = at - passed
    known = at < own + rest
    with_shared = passed // (parts * columns) * parts + passed % parts
    among = gl.where(is_shared, with_shared, shared * parts + first // columns)
    beside = gl.where(is_shared, passed // parts % columns, first % columns)
    return gl.where(known, among, tile), gl.where(known, beside, column)


@gluon.jit
def _predicted(tile, num_experts, shared, parts):
    """What is known of a tile before the choice: its number among those of routed experts, negative for a shared one's,
    its expert if it is the first of a routed one's, and which of the expert's tiles it is then."""
    own = tile - shared * parts
    return own, gl.where(own < 0, num_experts - shared + tile // parts, own), gl.where(own < 0, tile % parts, 0)


@gluon.jit
def _find(counts, tile, num_experts, shared, parts, ROWS: gl.constexpr, BLOCK_E: gl.constexpr):
    """The tile's expert, which of the expert's tiles it is, and how many pairs are in it or behind it (0 or less: there
    is no such tile)."""
    spread: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_E // (32 * gl.num_warps()))], [32], [gl.num_warps()], [0])
    own, expert, part = _predicted(tile, num_experts, shared, parts)
    routed = num_experts - shared
    if own >= routed:
        e = gl.arange(0, BLOCK_E, spread)
        count = gl.load(counts + e, mask=e < routed, other=0, cache_modifier=".cg")
        more = gl.associative_scan(gl.maximum((count + ROWS - 1) // ROWS - 1, 0), 0, plus)
        passed = more <= own - routed
        # when all have been passed, those that are no experts have been too
        expert = gl.sum(passed.to(gl.int32), 0)
        expert = gl.where(expert < routed, expert, num_experts)
        part = own - routed - gl.max(gl.where(passed, more, 0), 0) + 1
    # the last expert's count is all that is read for a tile behind the last
    count = gl.load(counts + gl.minimum(expert, num_experts - 1), cache_modifier=".cg")
    return expert, part, gl.where(expert < num_experts, count - part * ROWS, 0)


@gluon.jit(do_not_specialize=["capacity", "first", "parts"])
def list_kernel(
    x, w_desc, pairs, counts, weights, y, num_experts, shared, parts, inputs, outputs, expert_rows, capacity, first,
    limit,
    K: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BLOCK_E: gl.constexpr,
    STAGES: gl.constexpr, ACT: gl.constexpr, LIMITED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[pair] = act(x[token] · gate) ∘ (x[token] · up), or weight · x[pair] · matrix without ACT, for BN outputs of a
    tile; an expert has expert_rows rows of the matrix. BN divides the outputs, BK the inputs. With ACT, the first
    `first` programs ask for their expert's weights before they know whether anything chose it."""
    GATED: gl.constexpr = ACT is not None
    WIDE: gl.constexpr = 2 if GATED else 1
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = BN * WIDE * BK * 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    across: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    tile, column = _spread(gl.program_id(1), gl.program_id(0), num_experts, shared, parts)
    slices = inputs // BK
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WIDE, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, ROWS, BK], swizzled)
    # one arrival for the weights, and every thread's for its part of x
    bars = barriers(STAGES, 1 + 32 * WARPS)
    fence_async_shared()

    own, expected, _ = _predicted(tile, num_experts, shared, parts)
    early = (own < num_experts - shared) & (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0) < first)
    if GATED:
        row = expected * expert_rows + column * BN
        for place in gl.static_range(STAGES):
            load_weights(w_desc, bars, ring, place, row, outputs, place, early & (place < slices), BYTES, 1, 1, WIDE)
        if PDL:
            gdc_wait()
            # behind the wait: the next kernel may then read what was chosen before it waits itself
            gdc_launch_dependents()
    elif PDL:
        gdc_launch_dependents()
    expert, part, there = _find(counts, tile, num_experts, shared, parts, ROWS, BLOCK_E)
    if there > 0:
        row = expert * expert_rows + column * BN
        if (not GATED) | (early == 0):
            for place in gl.static_range(STAGES):
                load_weights(w_desc, bars, ring, place, row, outputs, place, place < slices, BYTES, 1, 1, WIDE)
        # Rows past the expert's last pair repeat it and are not stored.
        places = pairs + expert.to(gl.int64) * capacity + part * ROWS
        i = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, across)), there - 1)
        source = gl.load(places + i, cache_modifier=".cg").to(gl.int64)
        if GATED:
            source = source // K
        rows = x + source[:, None] * inputs + gl.arange(0, BK, gl.SliceLayout(0, across))[None, :]
        j = gl.arange(0, ROWS, gl.SliceLayout(0, flat))
        pair = gl.load(places + gl.minimum(j, there - 1), cache_modifier=".cg").to(gl.int64)
        if not GATED:
            weight = gl.load(weights + pair, cache_modifier=".cg")
            if PDL:
                gdc_wait()
        for place in gl.static_range(STAGES):
            if place < slices:
                load_pointers(x_ring.index(place), rows + place * BK)
                async_copy.mbarrier_arrive(bars.index(place), increment_count=False)
        acc = gl.zeros((BN, ROWS), gl.float32, mma)
        acc_up = acc
        for slice_ in range(slices):
            stage = slice_ % STAGES
            mbarrier.wait(bars.index(stage), (slice_ // STAGES) & 1)
            # copies of single threads are seen by the matrix unit behind a fence
            fence_async_shared()
            a = x_ring.index(stage).permute((1, 0))
            acc, acc_up = weight_product(acc, acc_up, ring, stage, a, WIDE)
            sync()
            following = slice_ + STAGES
            if following < slices:
                load_weights(w_desc, bars, ring, stage, row, outputs, following, following < slices, BYTES, 1, 1, WIDE)
                load_pointers(x_ring.index(stage), rows + following * BK)
                async_copy.mbarrier_arrive(bars.index(stage), increment_count=False)
        n = column * BN + gl.arange(0, BN, gl.SliceLayout(1, flat))
        out = gl.convert_layout(acc, flat)
        if GATED:
            up = gl.convert_layout(acc_up, flat)
            if LIMITED:
                out, up = limited(out, up, limit)
            out = activate(out, ACT) * up
        else:
            out = out * weight[None, :]
        spot = y + pair[None, :] * outputs + n[:, None]
        live = (j < there)[None, :] & (n >= 0)[:, None]
        gl.store(spot, out.to(y.dtype.element_ty), mask=live)
    elif GATED:
        if early:
            # what was asked for arrives before its memory is given back
            for place in gl.static_range(STAGES):
                if place < slices:
                    async_copy.mbarrier_arrive(bars.index(place), increment_count=False)
                    mbarrier.wait(bars.index(place), 0)
    elif PDL:
        gdc_wait()


@dataclass(frozen=True, slots=True)
class RingTile:
    """How a product is cut: outputs and inputs a tile (gate and up have as many each), tiles of the ring."""

    outputs: int
    inputs: int
    stages: int


@dataclass(frozen=True, slots=True)
class Rings:
    """The cut of both products, and how many programs of the first ask for weights before the choice."""

    up: RingTile
    down: RingTile
    first: int


# Two programs of the first fit a multiprocessor, three of the second.
UP, DOWN = RingTile(64, 128, 3), RingTile(128, 128, 2)
# Pairs a tile and inner channels of an expert: more of either were not measured.
MAX_ROWS, MAX_INNER = 16, 1408


def rings_fit(x: torch.Tensor, inter: int) -> bool:
    """Whether the copy engine can read all of it: 16-bit values in whole tiles."""
    return group_products(x.device) and x.element_size() == 2 and x.shape[1] % 128 == 0 and inter % 128 == 0


def ring_tiles(inter: int, rows: int, multiprocessors: int) -> Rings | None:
    """None for tiles of so many pairs, and experts of so many inner channels, that were not measured."""
    return None if rows > MAX_ROWS or inter > MAX_INNER else Rings(UP, DOWN, 2 * multiprocessors)


def lists_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    lists: Lists,
    rings: Rings,
) -> torch.Tensor:
    """`moe_gemm` by tiles of `lists`."""
    (t, hidden), k = x.shape, experts.shape[1]
    e, inter = gate_up.shape[0], gate_up.shape[1] // 2
    h = torch.empty(t * k, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(t * k, hidden, dtype=x.dtype, device=x.device)

    def product(
        source: torch.Tensor, table: torch.Tensor, target: torch.Tensor, tile: RingTile, act: str | None
    ) -> None:
        outputs = target.shape[1]
        workspace.launch(list_kernel, (outputs // tile.outputs, lists.tiles))(
            source, boxes(table.flatten(0, 1), tile.outputs, tile.inputs), lists.pairs, lists.counts, weights, target,
            e, lists.shared, lists.parts, table.shape[2], outputs, table.shape[1], lists.pairs.shape[1], rings.first,
            0.0 if limit is None else limit,
            K=k, ROWS=lists.rows, BN=tile.outputs, BK=tile.inputs, BLOCK_E=next_power_of_2(e),
            STAGES=tile.stages, ACT=act, LIMITED=limit is not None, PDL=workspace.pdl, num_warps=4,
            launch_pdl=workspace.pdl,
        )  # fmt: skip

    product(x, gate_up, h, rings.up, activation)
    product(h, down, y, rings.down, None)
    return combined(workspace, y, None, experts, weights, residual, e, x.dtype, whole=True)
