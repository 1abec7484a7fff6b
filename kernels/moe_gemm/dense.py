"""Feed-forward parts of the chosen experts: by row for a few tokens, by tiles of one expert for more.

Tiles and thresholds were measured on an H200 by `perf.tune.moe`.
"""

from __future__ import annotations

import torch

from kernels.hardware import bulk_copies
from kernels.moe_gemm.grouped import PAIRS, grouped_fits, grouped_moe
from kernels.moe_gemm.order import ordered, placed
from kernels.moe_gemm.rows import RowTile, rows_moe_gemm
from kernels.moe_gemm.tiles import PairTile, tiles_moe
from kernels.routing import ExpertBiases
from kernels.sizes import next_power_of_2
from kernels.weight import Dense
from kernels.workspace import Workspace

ROW_TOKENS = 4
# Pairs an expert beyond which, on Hopper, products are bound by arithmetic as much as by reading the experts.
GROUPED_PAIRS = 32


def moe_gemm(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Dense,
    down: Dense,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    num_shared: int = 0,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. Calls on a device share their counters: they must run in one stream order."""
    if not len(x):
        return torch.empty_like(x)
    x, experts, table = x.contiguous(), experts.contiguous(), gate_up.data
    inputs = (x, table, down.data, weights, experts, residual, activation, limit)
    inter = table.shape[1] // 2
    if not takes_tiles(activation, biases):
        if len(x) <= ROW_TOKENS or deterministic:
            return rows_moe_gemm(workspace, *inputs, num_shared, *row_tiles(inter))
        if experts.numel() > GROUPED_PAIRS * table.shape[0] and grouped_fits(x, table):
            return grouped_moe(workspace, *inputs, placed(workspace, experts, table.shape[0], PAIRS))
    # One cut whatever tokens there are gives each of them the same bits.
    pairs = 0 if deterministic else experts.numel()
    rows, up, down_tile = pair_tiles(pairs, table.shape[0], x.dtype, bulk_rows(x, inter))
    places = ordered(workspace, experts, table.shape[0], rows)
    return tiles_moe(workspace, *inputs, places, up, down_tile, biases)


def takes_tiles(activation: str, biases: ExpertBiases | None) -> bool:
    """Whether experts are of a kind that only tiles of pairs have: with biases, or gated otherwise than by a product of
    the activated gate and the up projection."""
    return biases is not None or activation == "swiglu_oai"


def bulk_rows(x: torch.Tensor, inter: int) -> bool:
    """Whether the bulk copy engine can read rows of matrices for x and for `inter` inner channels."""
    return bulk_copies(x.device) and all(size * x.element_size() % 16 == 0 for size in (x.shape[1], inter))


def row_tiles(inter: int) -> tuple[RowTile, RowTile]:
    """The cut of both products of a few tokens, for `inter` inner channels."""
    inputs = min(1024, max(32, next_power_of_2(inter)))
    return RowTile(4, 256, 4, 5), RowTile(8, inputs, 8) if inter <= 1024 else RowTile(4, inputs, 4)


def pair_tiles(pairs: int, num_experts: int, dtype: torch.dtype, bulk: bool) -> tuple[int, PairTile, PairTile]:
    """Pairs a tile and the cut of both products; `bulk` allows the bulk copy engine."""
    rows = min(128, max(16, next_power_of_2(pairs // num_experts)))
    if dtype == torch.float32:
        return min(rows, 64), PairTile(64, 32, 2, 4), PairTile(64, 32, 2, 4)
    if rows <= 32:
        return rows, PairTile(64, 128, 3, 4, True, bulk), PairTile(128, 64, 3, 4, True, bulk)
    up = PairTile(128, 32, 5, 8, False, bulk) if rows == 64 else PairTile(128, 64, 4, 8, False, bulk)
    return rows, up, PairTile(256, 64, 3, 8, False, bulk)
