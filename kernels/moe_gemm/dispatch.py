"""Which kernels compute the feed-forward parts of dense experts, decided once a shape: by row for a few tokens, by
tiles of one expert for more, by a Gluon kernel on Hopper for many. Thresholds and tiles were measured on an H200 by
`perf.tune.moe`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.moe_gemm.grouped import PAIRS, grouped_moe
from kernels.moe_gemm.operands import Operands
from kernels.moe_gemm.order import ordered, placed
from kernels.moe_gemm.rows import RowTile, rows_moe_gemm
from kernels.moe_gemm.tiles import PairTile, tiles_moe
from kernels.sizes import next_power_of_2
from kernels.tuned.tables import DEFAULT, numbers, tiles


class Problem(NamedTuple):
    """What the choice of kernels depends on.

    pairs of token and expert; experts whose matrices are here; inner channels of each. plain: without biases, the up
    projection times the activated gate. groups: the copy engine of a GPU whose groups of warps multiply from shared
    memory reads and writes all of it in whole boxes. bulk: a copy engine reads rows of the matrices. table: of tuned
    numbers.
    """

    tokens: int
    pairs: int
    experts: int
    inner: int
    dtype: torch.dtype
    plain: bool
    deterministic: bool
    groups: bool
    bulk: bool
    table: str = DEFAULT


class TilesCut(NamedTuple):
    """Pairs of a tile, and the cut of both products."""

    rows: int
    up: PairTile
    down: PairTile


class RowsCut(NamedTuple):
    """The cut of both products of a few tokens."""

    up: RowTile
    down: RowTile


def row_tiles(inter: int, table: str = DEFAULT) -> RowsCut:
    """For `inter` inner channels."""
    inputs = min(1024, max(32, next_power_of_2(inter)))
    up = tiles(table, "moe_gemm", "row_tiles", RowTile)["up"]
    return RowsCut(up, RowTile(8, inputs, 8) if inter <= 1024 else RowTile(4, inputs, 4))


def pair_tiles(pairs: int, num_experts: int, dtype: torch.dtype, bulk: bool, table: str = DEFAULT) -> TilesCut:
    """`bulk` allows the bulk copy engine."""
    rows, made = (
        min(128, max(16, next_power_of_2(pairs // num_experts))),
        tiles(table, "moe_gemm", "pair_tiles", PairTile),
    )
    if dtype == torch.float32:
        return TilesCut(min(rows, 64), made["wide_up"], made["wide_down"])
    if rows <= 32:
        up, down = made["few_up"], made["few_down"]
    else:
        up, down = made["some_up" if rows == 64 else "many_up"], made["down"]
    return TilesCut(rows, replace(up, tma=bulk), replace(down, tma=bulk))


def many_pairs(pairs: int, experts: int, table: str, threshold: str = "grouped_pairs") -> bool:
    """Whether, on Hopper, products of so many pairs are bound by arithmetic as much as by reading the experts: where
    they are more than the tuned number of that name for each."""
    return bool(pairs > numbers(table, "moe_gemm")[threshold] * experts)


def _not_rows(problem: Problem) -> str | None:
    if not problem.plain:
        return "has neither biases nor swiglu_oai"
    most = numbers(problem.table, "moe_gemm")["row_tokens"]
    if problem.tokens > most and not problem.deterministic:
        return f"for up to {most} tokens, and for runtime.deterministic"
    return None


def _not_grouped(problem: Problem) -> str | None:
    if not problem.plain:
        return "has neither biases nor swiglu_oai"
    if not many_pairs(problem.pairs, problem.experts, problem.table):
        return f"for more than {numbers(problem.table, 'moe_gemm')['grouped_pairs']} pairs an expert"
    return None if problem.groups else "needs Hopper, a 16-bit type, and channels in whole boxes of 64"


def _tiles_cut(problem: Problem) -> TilesCut:
    # One cut whatever tokens there are gives each of them the same bits.
    pairs = 0 if problem.deterministic else problem.pairs
    return pair_tiles(pairs, problem.experts, problem.dtype, problem.bulk, problem.table)


def _rows(operands: Operands, cut: RowsCut) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, num_shared, _ = operands
    given = (weights, experts, residual, activation, limit, num_shared)
    return rows_moe_gemm(workspace, x, gate_up, down, *given, cut.up, cut.down)


def _grouped(operands: Operands, pairs: int) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, _ = operands
    places = placed(workspace, experts, gate_up.shape[0], pairs)
    return grouped_moe(workspace, x, gate_up, down, weights, experts, residual, activation, limit, places)


def _tiles(operands: Operands, cut: TilesCut) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, biases = operands
    rows, up, out = cut
    given = (weights, experts, residual, activation, limit, ordered(workspace, experts, gate_up.shape[0], rows))
    return tiles_moe(workspace, x, gate_up, down, *given, up, out, biases)


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "rows",
            _not_rows,
            lambda problem: row_tiles(problem.inner, problem.table),
            _rows,
            "docs/experiments/2026-11-22-moe-decode.md (moe-tiles.jsonl)",
        ),
        Variant(
            "grouped",
            _not_grouped,
            lambda problem: PAIRS,
            _grouped,
            "docs/experiments/2026-11-22-moe-prompts.md (moe-grouped.jsonl, moe-grouped-turns.jsonl)",
        ),
        Variant(
            "tiles",
            lambda problem: None,
            _tiles_cut,
            _tiles,
            "what nothing else takes; tiles by perf.tune.moe (moe-tiles.jsonl)",
        ),
    ]
)
