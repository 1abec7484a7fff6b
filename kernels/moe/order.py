# mypy: disable-error-code="no-untyped-def"
"""The choice of a decode step's experts and the order of its pairs by expert, in one launch.

Each program chooses for a token and takes places within its experts from the counters; the last to arrive knows all
counts and puts the pairs in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe_gemm.order import CHUNK, FEW, Order, add_up, counters, most_tiles
from kernels.moe_route.choose import choose, summed


@triton.jit(do_not_specialize=["tokens"])
def choose_and_order(
    parts,
    bias,
    table,
    token_ids,
    weights,
    experts,
    counts,
    rank,
    order,
    offsets,
    ends,
    tokens,
    num_experts,
    scale,
    SPLITS: tl.constexpr,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HASHED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts [SPLITS, tokens, E] sum to the logits. counts [BLOCK_C ≥ E + SHARED + 1] holds zeros before and after; its
    entry behind the experts counts programs. PAIRS and ends as in `moe_gemm.order`, whose tiles have ROWS pairs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    width: tl.constexpr = K + SHARED
    t = tl.program_id(0).to(tl.int64)
    token = t + tl.arange(0, 1)
    picked = choose(
        summed(parts, token, tokens, num_experts, SPLITS, BLOCK_E),
        token,
        token < tokens,
        bias,
        table,
        token_ids,
        weights,
        experts,
        num_experts,
        scale,
        SCORE,
        HAS_BIAS,
        HASHED,
        GROUPS,
        TOP_GROUPS,
        TOP2,
        RENORMALIZE,
        K,
        SHARED,
        1,
        BLOCK_K,
        BLOCK_E,
        BLOCK_G,
    )
    every = num_experts + SHARED
    k = tl.arange(0, BLOCK_K)[None, :]
    place = tl.atomic_add(counts + picked, 1, mask=k < width, sem="relaxed")
    tl.store(rank + t * width + k, place, mask=k < width)
    tl.debug_barrier()
    if tl.atomic_add(counts + every, 1, sem="acq_rel", scope="gpu") < tokens - 1:
        return
    add_up(counts, offsets, ends, every, ROWS, BLOCK_C)
    tl.debug_barrier()
    pair = tl.arange(0, PAIRS)
    there = pair < tokens * width
    expert = tl.load(experts + pair, mask=there, other=0, cache_modifier=".cg")
    at = tl.load(rank + pair, mask=there, other=0, cache_modifier=".cg")
    first = tl.load(offsets + expert, mask=there, other=0, cache_modifier=".cg")
    tl.store(order + first + at, pair, mask=there)


def chosen_in_order(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    rows: int,
    scale: float,
    how: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, Order]:
    """Weights and experts [T, K + S] of `parts` [splits, T, E], and their pairs, up to CHUNK of them, in tiles of
    `rows`. `how` names the constants of the choice (`moe_route.kernel.choice`). Calls on a device share their counters:
    they must run in one stream order."""
    splits, t, e = parts.shape
    device, every, width = parts.device, e + how["SHARED"], how["K"] + how["SHARED"]
    pairs = t * width

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    weights = torch.empty(t, width, dtype=torch.float32, device=device)
    experts, rank, order = integers(t, width), integers(pairs), integers(pairs)
    offsets, ends = integers(every + 1), integers(every)
    choose_and_order[(t,)](
        parts, bias, table, token_ids, weights, experts, counters(device, every), rank, order, offsets, ends,
        t, e, scale, SPLITS=splits, ROWS=rows, PAIRS=FEW if pairs <= FEW else CHUNK,
        BLOCK_C=triton.next_power_of_2(every + 1), num_warps=4, **how,
    )  # fmt: skip
    return weights, experts, Order(order, offsets, ends, rows, most_tiles(pairs, every, rows))
