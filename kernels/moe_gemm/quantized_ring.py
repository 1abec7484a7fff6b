"""The feed-forward parts of quantized experts in a decode step on Hopper: two launches of `quantized_list_kernel`,
whose tiles depend on how many pairs there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.hardware import group_products, multiprocessors
from kernels.hopper.boxes import boxes
from kernels.moe_gemm.order import ordered
from kernels.moe_gemm.quantized_list import quantized_list_kernel
from kernels.moe_gemm.tiles import combined
from kernels.quantize.kernel import quantized
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Fp4, Fp8, Int8, PackedInt
from kernels.workspace import Workspace

# Inputs of a block and of a stage of the ring.
WIDTH, UNIT = 128, 256
# Pairs up to which each is a tile.
ALONE_PAIRS = 32
# Where tiles of a pair each are shared: programs of a multiprocessor and of a tile, at most; units of a program, at
# least.
PROGRAMS, MAX_SPLITS, UNITS = 4, 4, 4
# Tiles of eight and of sixteen pairs take so many pairs an expert, on average; of a Poisson distribution 2 % of experts
# have more than eight then, and 10 % more than sixteen.
SMALL_TILE_PAIRS, MIDDLE_TILE_PAIRS = 4, 12
# Stages with which so many programs of a tile of one pair share a multiprocessor, by shared memory.
RESIDENT, FEW_STAGES = ((6, 3), (4, 4)), 3
# Counters of arrivals: more than there are tiles of so few pairs.
_ARRIVALS = 1 << 16

# Int8 is for other kernels.
Quantized = Fp4 | Fp8 | Int8 | PackedInt


@dataclass(frozen=True, slots=True)
class RingTile:
    """pairs a tile, at most, and rows of a matrix (packed numbers: 64 or 128, 8-bit floats: 64); stages of the ring
    and programs that share a tile of one pair, 0: what `alone_cut` says."""

    pairs: int
    rows: int
    stages: int
    splits: int = 0


def ring_tile(pairs: int, experts: int, packed: bool) -> RingTile:
    """The tile of so many pairs of so many experts: as many as its expert is likely to have. Tiles of 128 rows unpack
    twice as many numbers for the same inputs, where there are enough of them to fill the GPU.

    Measured on an H200: docs/experiments/2026-11-25-unpacking-4-bit-experts.md.
    """
    if not packed:
        return RingTile(8 if pairs <= ALONE_PAIRS else 16, 64, 4)
    if pairs <= ALONE_PAIRS:
        return RingTile(8, 64, 0)
    each = 8 if pairs <= SMALL_TILE_PAIRS * experts else 16 if pairs <= MIDDLE_TILE_PAIRS * experts else 32
    return RingTile(each, 128, 2)


def ring_fits(x: torch.Tensor, gate_up: Quantized, down: Quantized) -> bool:
    """Whether `quantized_ring_moe` takes these."""
    if x.dtype != torch.bfloat16 or not group_products(x.device):
        return False
    (_, width, hidden), inter = gate_up.shape, down.shape[2]
    whole = hidden % 64 == 0 and inter % 64 == 0 and width == 2 * inter
    return whole and all(_streams(weight) for weight in (gate_up, down))


def _streams(weight: Quantized) -> bool:
    data, scale = weight.data, weight.scale
    if isinstance(weight, Int8):
        return False
    if not (data.is_contiguous() and scale.is_contiguous() and data.data_ptr() % 16 == 0 and data.shape[-1] % 16 == 0):
        return False
    if isinstance(weight, Fp4):
        return weight.rounding.number is None and weight.group in (16, 32)
    if isinstance(weight, Fp8):
        wide = weight.scale.shape[-1] == 1 or weight.block[1] == WIDTH
        return weight.inputs.number == "fp8" and wide and weight.inputs.group in (0, WIDTH)
    group = weight.group
    grouped = group in (16, 32, 64) or group % WIDTH == 0 or group >= weight.inputs
    plain = weight.order is None and not weight.rounds_inputs
    return weight.bits == 4 and grouped and plain and scale.dtype == torch.bfloat16


def alone_cut(columns: int, tokens: int, k: int, units: int, multiprocessors: int) -> tuple[int, int]:
    """Where each of k pairs a token is a tile, of which there are that many columns: how many programs share a tile's
    units, and stages of their rings. As many stages as let all programs be resident at once, else as few as keep bytes
    in flight.

    Tokens count as the next power of two, so that the steps that compile kernels ahead meet every cut.
    """
    programs = columns * next_power_of_2(tokens) * k
    shared = max(1, min(units // UNITS, MAX_SPLITS, PROGRAMS * multiprocessors // programs))
    fitting = (stages for stages, each in RESIDENT if programs * shared <= each * multiprocessors)
    return shared, min(next(fitting, FEW_STAGES), cdiv(units, shared))


def quantized_ring_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Quantized,
    down: Quantized,
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
    packed = not any(isinstance(weight, Fp8) for weight in (gate_up, down))
    tile = tile or ring_tile(pairs, count, packed)
    where: tuple[torch.Tensor | None, ...] = (experts, None, None)
    tiles = pairs
    if not alone:
        order = ordered(workspace, experts, count, tile.pairs)
        where, tiles = (order.order, order.offsets, order.ends), order.tiles
    h = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)

    def product(source: torch.Tensor, weight: Quantized, target: torch.Tensor, act: str | None) -> None:
        bias = None if biases is None else (biases.down if act is None else biases.gate_up)
        outputs = target.shape[1]
        height, inputs = tile.rows if act is None else tile.rows // 2, source.shape[1]
        source, scales, held, constants = _operands(workspace, source, weight)
        strides = (0, 0) if scales is None else scales.stride()
        columns, units, shared = cdiv(outputs, height), cdiv(inputs, UNIT), 1
        partials: torch.Tensor | None = None
        counts: torch.Tensor | None = None
        stages = tile.stages
        if alone:
            found = alone_cut(columns, t, k, units, multiprocessors(x.device))
            shared, stages = tile.splits or found[0], tile.stages or found[1]
        if shared > 1:
            partials = torch.empty(columns * tiles * shared * tile.rows, dtype=torch.float32, device=x.device)
            counts = workspace.counters("splits of experts' products", _ARRIVALS)
        workspace.launch(quantized_list_kernel, (columns, tiles, shared))(
            source, scales, boxes(weight.data.flatten(0, 1), height, 64 if constants["PACKED"] else 128), *held, bias,
            *where, weights, target, partials, counts, count, inputs, outputs, weight.shape[1], weight.scale.shape[-1],
            weight.scale.shape[1], *strides, limit or 0.0,
            TOP=k, HEIGHT=tile.rows, ROWS=tile.pairs, ALONE=alone, SPLITS=shared, BLOCK_E=next_power_of_2(count),
            STAGES=min(stages, cdiv(units, shared)), **constants, ACT=act,
            LIMITED=act is not None and limit is not None, BIASED=bias is not None,
            PDL=workspace.pdl, num_warps=4, launch_pdl=workspace.pdl,
        )  # fmt: skip

    product(x, gate_up, h, activation)
    product(h, down, y, None)
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)


def _operands(
    workspace: Workspace, x: torch.Tensor, weight: Quantized
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, ...], dict[str, Any]]:
    """x and its scales as the product takes them, the weight's scales and what stands beside them, and what is compiled
    in."""
    constants: dict[str, Any] = {"BLOCK_ROWS": 1, "BLOCKED": False, "GROUPED": False}
    if isinstance(weight, (Fp8, Int8)):
        numbers, scales = quantized(workspace, x, weight.inputs)
        constants |= {
            "PACKED": False, "FLOAT": False, "GROUP": 0, "SCALES": 1, "BESIDE": False,
            "BLOCK_ROWS": weight.block[0], "BLOCKED": weight.scale.shape[-1] > 1, "GROUPED": scales.shape[1] > 1,
        }  # fmt: skip
        return numbers, scales, (weight.scale, None), constants
    whole = weight.group >= weight.inputs
    beside = weight.factor if isinstance(weight, Fp4) else weight.zero
    constants |= {
        "PACKED": True, "FLOAT": isinstance(weight, Fp4), "GROUP": 0 if whole else weight.group,
        "SCALES": 1 if whole else max(1, WIDTH // weight.group), "BESIDE": beside is not None,
    }  # fmt: skip
    return x, None, (weight.scale, beside), constants
