"""Which kernels compute the feed-forward parts of quantized experts, decided once a shape. Thresholds and tiles were
measured on an H200 by `perf.tune.quantized`.

Few pairs take a Gluon kernel on Hopper that streams the weights as they are stored: one for 8-bit floats, which
quantizes its inputs itself, and one for 4-bit numbers, which takes few pairs an expert too. Many pairs take another one
with 8-bit floats; 4-bit numbers are written out for the dense kernels. What is between, or has no such kernel, takes
tiles that read the weights packed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.linear.packed_rows import WIDTH
from kernels.moe_gemm.alone_cut import ALONE_PAIRS
from kernels.moe_gemm.dispatch import TilesCut, many_pairs
from kernels.moe_gemm.fp8_alone import MAX_INPUTS, fp8_alone_moe
from kernels.moe_gemm.grouped_fp8 import PAIRS, GroupedFp8Tile, grouped_fp8_moe
from kernels.moe_gemm.operands import Operands
from kernels.moe_gemm.order import placed
from kernels.moe_gemm.packed import packed_moe
from kernels.moe_gemm.quantized_ring import quantized_ring_moe
from kernels.moe_gemm.tiles import PairTile
from kernels.moe_gemm.w8a8 import w8a8_moe
from kernels.moe_gemm.written_out import written_out_moe
from kernels.sizes import next_power_of_2
from kernels.tuned.tables import DEFAULT, numbers

# Pairs of a tile, at most.
MAX_PAIRS = 64
# The tuned number from which pairs an expert on 8-bit floats are many.
GROUPED_FP8 = "grouped_fp8_pairs"


class QuantizedProblem(NamedTuple):
    """What the choice of kernels depends on.

    kind: "fp4", "packed" (integers), "fp8" or "int8". pairs of token and expert; experts whose matrices are here.
    ring, alone: the copy engine reads both tables in whole boxes, and numbers and scales are such as the kernel of that
    name has, on a GPU of its kind. writes_out: inputs stay as they are, in the weight's order. table: of tuned numbers.
    groups: `grouped_fp8` takes both tables, with an activation that it has and no biases.
    """

    kind: str
    pairs: int
    experts: int
    dtype: torch.dtype
    deterministic: bool
    ring: bool
    writes_out: bool
    table: str = DEFAULT
    groups: bool = False
    alone: bool = False


def pair_tiles(pairs: int, num_experts: int, dtype: torch.dtype) -> TilesCut:
    tile = PairTile(64, WIDTH, 2 if dtype == torch.float32 else 3, 4)
    return TilesCut(min(MAX_PAIRS, max(16, next_power_of_2(pairs // num_experts))), tile, tile)


def few_pairs(kind: str, pairs: int, experts: int, table: str) -> bool:
    """Whether products of so many pairs gain by the ring kernel. Tiles of more pairs are faster beyond."""
    return bool(pairs <= max(ALONE_PAIRS, numbers(table, "moe_gemm")["ring_pairs"].get(kind, 0) * experts))


def fills_experts(pairs: int, experts: int, table: str) -> bool:
    """Whether writing out is faster for so many pairs than tiles that read the weight packed."""
    return bool(pairs >= numbers(table, "moe_gemm")["written_pairs"] * experts)


def _not_alone(problem: QuantizedProblem) -> str | None:
    if problem.deterministic:
        return "its tiles depend on the number of pairs"
    if problem.pairs > ALONE_PAIRS:
        return f"for up to {ALONE_PAIRS} pairs"
    if not problem.alone:
        return (
            f"needs Hopper, bfloat16, up to {MAX_INPUTS} channels in whole boxes of 64, and 8-bit floats on both "
            "sides with scales of 128 inputs or all"
        )
    return None


def _not_ring(problem: QuantizedProblem) -> str | None:
    if problem.deterministic:
        return "its tiles depend on the number of pairs"
    if not few_pairs(problem.kind, problem.pairs, problem.experts, problem.table):
        each = numbers(problem.table, "moe_gemm")["ring_pairs"].get(problem.kind, 0)
        return f"for up to {ALONE_PAIRS} pairs" + (f", or {each} an expert" if each else "")
    if not problem.ring:
        return "needs Hopper, bfloat16, channels in whole boxes of 64, and 4-bit numbers"
    return None


def _not_grouped(problem: QuantizedProblem) -> str | None:
    if problem.deterministic:
        return "its tiles depend on the number of pairs"
    if not many_pairs(problem.pairs, problem.experts, problem.table, GROUPED_FP8):
        return f"for more than {numbers(problem.table, 'moe_gemm')[GROUPED_FP8]} pairs an expert"
    return (
        None
        if problem.groups
        else "needs Hopper, 16-bit inputs, and 8-bit floats with scales of whole blocks of 128 by 128 or of rows"
    )


def _not_written_out(problem: QuantizedProblem) -> str | None:
    if problem.deterministic:
        return "its tiles depend on the number of pairs"
    if not fills_experts(problem.pairs, problem.experts, problem.table):
        return f"for {numbers(problem.table, 'moe_gemm')['written_pairs']} pairs an expert and more"
    return None if problem.writes_out else "for 4-bit numbers, and integers, whose inputs are not rounded or reordered"


def _tiles_cut(problem: QuantizedProblem) -> TilesCut:
    # One cut whatever pairs there are gives each of them the same bits.
    pairs = 0 if problem.deterministic else problem.pairs
    return pair_tiles(pairs, problem.experts, problem.dtype)


def _alone(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, biases = operands
    return fp8_alone_moe(workspace, x, gate_up, down, weights, experts, residual, activation, limit, biases)


def _ring(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, biases = operands
    return quantized_ring_moe(workspace, x, gate_up, down, weights, experts, residual, activation, limit, biases)


def _grouped(operands: Operands, tile: GroupedFp8Tile) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, _ = operands
    experts = experts.contiguous()
    places = placed(workspace, experts, gate_up.shape[0], PAIRS)
    given = (weights, experts, residual, activation, limit, places, tile)
    return grouped_fp8_moe(workspace, x, gate_up, down, *given)


def _written_out(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, biases = operands
    return written_out_moe(workspace, x, gate_up, down, weights, experts, residual, activation, limit, biases)


def _packed_tiles(operands: Operands, cut: TilesCut) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, biases = operands
    given = (weights, experts, residual, activation, limit, biases)
    return packed_moe(workspace, x, gate_up, down, *given, cut.rows, cut.up, cut.down)


def _w8a8_tiles(operands: Operands, cut: TilesCut) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, biases = operands
    given = (weights, experts, residual, activation, limit, biases)
    return w8a8_moe(workspace, x, gate_up, down, *given, cut.rows, cut.up, cut.down)


DISPATCH: Dispatch[QuantizedProblem] = Dispatch(
    [
        Variant(
            "alone",
            _not_alone,
            lambda problem: None,
            _alone,
            "docs/experiments/2026-11-29-few-pairs-of-fp8-experts.md",
        ),
        Variant(
            "ring",
            _not_ring,
            lambda problem: None,
            _ring,
            "docs/experiments/2026-11-24-quantized-experts.md (quantized-experts.jsonl)",
        ),
        Variant(
            "grouped",
            _not_grouped,
            lambda problem: GroupedFp8Tile(),
            _grouped,
            "docs/experiments/2026-11-27-many-pairs-of-fp8-experts.md",
        ),
        Variant(
            "written_out",
            _not_written_out,
            lambda problem: None,
            _written_out,
            "docs/experiments/2026-11-24-quantized-experts.md (quantized-experts.jsonl), many pairs",
        ),
        Variant(
            "w8a8_tiles",
            lambda problem: (
                None if problem.kind in ("fp8", "int8") else "for 8-bit floats and integers with a scale a row"
            ),
            _tiles_cut,
            _w8a8_tiles,
            "docs/experiments/2026-11-24-quantized-experts.md, tiles of the Triton kernels",
        ),
        Variant(
            "packed_tiles",
            lambda problem: None,
            _tiles_cut,
            _packed_tiles,
            "docs/experiments/2026-11-24-quantized-experts.md, tiles of the Triton kernels",
        ),
    ]
)
