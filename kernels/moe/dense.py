"""Routed experts with fewer launches than choice and products have by themselves, where that is faster."""

from __future__ import annotations

import torch

from kernels.moe.count import chosen_in_tiles
from kernels.moe.lists import MAX_EXPERTS, chosen_in_lists
from kernels.moe.rows import routed_rows_moe
from kernels.moe.scores import scored
from kernels.moe_gemm.dense import GROUPED_PAIRS, ROW_TOKENS, bulk_rows, moe_gemm, pair_tiles, row_tiles, takes_tiles
from kernels.moe_gemm.grouped import PAIRS, grouped_fits, grouped_moe
from kernels.moe_gemm.order import CHUNK
from kernels.moe_gemm.rows import RowTile
from kernels.moe_gemm.tiles import tiles_moe
from kernels.moe_gemm.tma_ring import lists_moe, ring_tiles
from kernels.moe_route.kernel import ONE_LAUNCH_TOKENS, choice, moe_route
from kernels.moe_route.logits import BF16_THIRDS_TOKENS, logit_partials
from kernels.rms_norm.kernel import rms_norm
from kernels.routing import ExpertBiases, Routing
from kernels.weight import Dense
from kernels.workspace import Workspace

# Inner channels of an expert that a few tokens' products find by themselves; of larger ones they gain nothing by it.
SMALL_EXPERT = 1024


def chooses_in_products(tokens: int, inter: int, experts: int, plain: bool) -> bool:
    """Whether the products find their experts by themselves: for a few tokens and small experts, where the choice is
    `plain`, that is the highest of the scores."""
    return tokens <= ROW_TOKENS and inter <= SMALL_EXPERT and experts <= MAX_EXPERTS and plain


def down_tile(tokens: int, inter: int) -> RowTile:
    """The cut of the down product: whole rows in registers for one token, a pipeline for more."""
    return row_tiles(inter)[1] if tokens == 1 else RowTile(8, 512, 4, 5)


def chooses_in_lists(tokens: int, pairs: int, experts: int) -> bool:
    """Whether the launch that chooses lists each expert's pairs as well, as it does for tiles of a decode step."""
    return tokens > ONE_LAUNCH_TOKENS and pairs <= min(CHUNK, GROUPED_PAIRS * experts)


def counts_in_choice(tokens: int, pairs: int, experts: int, by_token: bool) -> bool:
    """Whether the launch that chooses counts each expert's pairs as well, as it does for tiles of a prompt unless the
    choice is `by_token` ids, which may name an expert twice."""
    return tokens >= BF16_THIRDS_TOKENS and pairs > GROUPED_PAIRS * experts and not by_token


def moe(
    workspace: Workspace,
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Dense,
    down: Dense,
    routing: Routing,
    token_ids: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. Calls on a device share their counters: they must run in one stream order."""
    up, out = gate_up.data, down.data
    tokens, inter = len(x), up.shape[1] // 2
    pairs = tokens * routing.width
    bias, table, scale, num_shared = routing.bias, routing.table, routing.scale, routing.num_shared
    # What chooses and lists at once has a list for every expert.
    alone = deterministic or not tokens or takes_tiles(activation, biases) or len(up) != len(router) + num_shared
    plain = routing.score == "softmax" and bias is None and table is None and routing.num_groups == 1 and not num_shared
    if not alone and chooses_in_products(tokens, inter, len(router), plain):
        return routed_rows_moe(
            workspace, x, router, up, out, routing.top_k, norm_weight, eps, offset, routing.renormalize, scale,
            residual, activation, limit, row_tiles(inter)[0], down_tile(tokens, inter),
        )  # fmt: skip
    listed = not alone and chooses_in_lists(tokens, pairs, len(up))
    counted = not (alone or listed) and counts_in_choice(tokens, pairs, len(up), table is not None)
    if listed or (counted and grouped_fits(x, up)):
        h = (x if norm_weight is None else rms_norm(workspace, x, norm_weight, eps, offset=offset)[0]).contiguous()
        constants = choice(len(router), routing)
        after = (residual, activation, limit)
        if not listed:
            weights, experts, found = chosen_in_tiles(
                workspace, logit_partials(workspace, h, router), bias, PAIRS, scale, constants
            )
            return grouped_moe(workspace, h, up, out, weights, experts, *after, found)
        rows, up_cut, down_cut = pair_tiles(pairs, len(up), x.dtype, bulk_rows(x, inter))
        partials, counts = scored(workspace, h, router, num_shared)
        weights, experts, lists = chosen_in_lists(
            workspace, partials, counts, bias, table, token_ids, rows, scale, constants
        )
        rings = ring_tiles(h, inter, rows)
        if rings is not None:
            return lists_moe(workspace, h, up, out, weights, experts, *after, lists, rings)
        return tiles_moe(workspace, h, up, out, weights, experts, *after, lists, up_cut, down_cut)
    h, weights, experts = moe_route(workspace, x, router, routing, token_ids, norm_weight, eps, offset, deterministic)
    given = (residual, activation, limit, routing.num_shared, deterministic, biases)
    return moe_gemm(workspace, h, gate_up, down, weights, experts, *given)
