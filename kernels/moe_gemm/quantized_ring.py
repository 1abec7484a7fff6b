"""The feed-forward parts of experts of packed numbers in a decode step on Hopper: two launches of
`quantized_list_kernel`, whose tiles depend on how many pairs there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.moe_gemm.alone_cut import ALONE_PAIRS, UNIT, WIDTH, packed_cut
from kernels.moe_gemm.expert_tiles import Quantized, shared_tiles, whole_tiles
from kernels.moe_gemm.order import ordered
from kernels.moe_gemm.quantized_list import quantized_list_kernel
from kernels.moe_gemm.tiles import combined
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Fp4, Fp8, Int8, PackedInt
from kernels.workspace import Workspace

# Tiles of eight and of sixteen pairs take so many pairs an expert, on average; of a Poisson distribution 2 % of experts
# have more than eight then, and 10 % more than sixteen.
SMALL_TILE_PAIRS, MIDDLE_TILE_PAIRS = 4, 12

Packed = Fp4 | PackedInt


@dataclass(frozen=True, slots=True)
class RingTile:
    """pairs a tile, at most, and rows of a matrix, 64 or 128; stages of the ring and programs that share a tile of one
    pair, 0: what `packed_cut` says."""

    pairs: int
    rows: int
    stages: int
    splits: int = 0


def ring_tile(pairs: int, experts: int) -> RingTile:
    """The tile of so many pairs of so many experts: as many as its expert is likely to have. Tiles of 128 rows unpack
    twice as many numbers for the same inputs, where there are enough of them to fill the GPU.

    Measured on an H200: docs/experiments/2026-11-25-unpacking-4-bit-experts.md.
    """
    if pairs <= ALONE_PAIRS:
        return RingTile(8, 64, 0)
    each = 8 if pairs <= SMALL_TILE_PAIRS * experts else 16 if pairs <= MIDDLE_TILE_PAIRS * experts else 32
    return RingTile(each, 128, 2)


def ring_fits(x: torch.Tensor, gate_up: Quantized, down: Quantized) -> bool:
    """Whether `quantized_ring_moe` takes these."""
    if x.dtype != torch.bfloat16 or not group_products(x.device) or not whole_tiles(gate_up, down):
        return False
    return all(_streams(weight) for weight in (gate_up, down))


def _streams(weight: Quantized) -> bool:
    data, scale = weight.data, weight.scale
    if isinstance(weight, (Fp8, Int8)):
        return False
    if not (data.is_contiguous() and scale.is_contiguous() and data.data_ptr() % 16 == 0 and data.shape[-1] % 16 == 0):
        return False
    if isinstance(weight, Fp4):
        return weight.rounding.number is None and weight.group in (16, 32)
    group = weight.group
    grouped = group in (16, 32, 64) or group % WIDTH == 0 or group >= weight.inputs
    plain = weight.order is None and not weight.rounds_inputs
    return weight.bits == 4 and grouped and plain and scale.dtype == torch.bfloat16


def quantized_ring_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    biases: ExpertBiases | None,
    tile: RingTile | None = None,
) -> torch.Tensor:
    """`moe_gemm` of what `ring_fits` takes. tile: else what `ring_tile` says."""
    x, experts = x.contiguous(), experts.contiguous()
    (t, hidden), k, count = x.shape, experts.shape[1], gate_up.data.shape[0]
    pairs, inter = t * k, down.shape[2]
    alone = pairs <= ALONE_PAIRS
    tile = tile or ring_tile(pairs, count)
    where: tuple[torch.Tensor | None, ...] = (experts, None, None)
    tiles = pairs
    if not alone:
        order = ordered(workspace, experts, count, tile.pairs)
        where, tiles = (order.order, order.offsets, order.ends), order.tiles
    h = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)

    def product(source: torch.Tensor, weight: Packed, target: torch.Tensor, act: str | None) -> None:
        bias = None if biases is None else (biases.down if act is None else biases.gate_up)
        outputs = target.shape[1]
        height, inputs = tile.rows if act is None else tile.rows // 2, source.shape[1]
        beside, constants = _scales(weight)
        columns, units, shared = cdiv(outputs, height), cdiv(inputs, UNIT), 1
        stages = tile.stages
        if alone:
            found = packed_cut(columns, t, k, units, multiprocessors(x.device))
            shared, stages = tile.splits or found.splits, tile.stages or found.stages
        partials, counts = shared_tiles(workspace, columns * tiles, shared, tile.rows)
        workspace.launch(quantized_list_kernel, (columns, tiles, shared))(
            source, boxes(weight.data.flatten(0, 1), height, WIDTH // 2), weight.scale, beside, bias,
            *where, weights, target, partials, counts, count, inputs, outputs, weight.shape[1], weight.scale.shape[-1],
            limit or 0.0,
            TOP=k, HEIGHT=tile.rows, ROWS=tile.pairs, ALONE=alone, SPLITS=shared, BLOCK_E=next_power_of_2(count),
            STAGES=min(stages, cdiv(units, shared)), **constants, ACT=act,
            LIMITED=act is not None and limit is not None, BIASED=bias is not None,
            PDL=workspace.pdl, num_warps=4, launch_pdl=workspace.pdl,
        )  # fmt: skip

    product(x, gate_up, h, activation)
    product(h, down, y, None)
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)


def _scales(weight: Packed) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """What stands beside the weight's scales, and what is compiled in."""
    whole = weight.group >= weight.inputs
    beside = weight.factor if isinstance(weight, Fp4) else weight.zero
    constants = {
        "FLOAT": isinstance(weight, Fp4), "GROUP": 0 if whole else weight.group,
        "SCALES": 1 if whole else max(1, WIDTH // weight.group), "BESIDE": beside is not None,
    }  # fmt: skip
    return beside, constants
