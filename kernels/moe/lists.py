# mypy: disable-error-code="no-untyped-def"
"""The choice of a decode step's experts, and a list of its pairs for each expert, in one launch.

A program chooses for a token and puts its pairs into the lists of their experts, at places from the counters; none
waits for another. Where the highest of few logits are chosen, one warp finds them in rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe_gemm.order import Lists
from kernels.moe_route.choose import Choice, choose, summed
from kernels.moe_route.places import best, ordered, value_of
from kernels.sizes import cdiv
from kernels.workspace import Workspace

# Experts whose ranks a warp holds, a few a thread.
MAX_EXPERTS = 128


@triton.jit
def _highest(
    x,
    token,
    weights,
    experts,
    num_experts,
    scale,
    HOW: tl.constexpr,
):
    """As `choose`, of one token, where the highest logits are chosen and weighed by their softmax. Experts are ranked
    by their logits alone, as in `moe_route.places`."""
    K: tl.constexpr = HOW.top_k
    BLOCK_K: tl.constexpr = HOW.block_k
    BLOCK_E: tl.constexpr = HOW.block_e
    k = tl.arange(0, BLOCK_K)[None, :]
    rank = ordered(x, tl.arange(0, BLOCK_E)[None, :] < num_experts)
    picked = num_experts + k - K
    value = tl.full((1, BLOCK_K), float("-inf"), tl.float32)
    for i in tl.static_range(K):
        top, expert, rank = best(rank, BLOCK_E)
        own = value_of(top)
        if i == 0:
            highest = own
        picked = tl.where(k == i, expert, picked)
        value = tl.where(k == i, own, value)
    value = tl.exp(value - highest)
    if HOW.renormalize:
        value = value / tl.sum(value, 1)[:, None]
    else:
        value = value / tl.sum(tl.exp(x - highest), 1)[:, None]
    width: tl.constexpr = K + HOW.shared
    out = token.to(tl.int64)[:, None] * width + k
    tl.store(weights + out, tl.where(k < K, value * scale, 1.0), mask=k < width)
    tl.store(experts + out, picked, mask=k < width)
    return picked


@triton.jit(do_not_specialize=["capacity", "tokens"])
def choose_and_list(
    partials,
    bias,
    table,
    token_ids,
    weights,
    experts,
    counts,
    pairs,
    capacity,
    tokens,
    num_experts,
    scale,
    SPLITS: tl.constexpr,
    HOW: tl.constexpr,
    ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials [SPLITS, tokens, E] sum to the logits. counts [E + SHARED] holds zeros before; pairs [E + SHARED,
    capacity]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    width: tl.constexpr = HOW.top_k + HOW.shared
    t = tl.program_id(0).to(tl.int64)
    token = t + tl.arange(0, 1)
    x = summed(partials, token, tokens, num_experts, SPLITS, HOW.block_e)
    if ROUNDS:
        picked = _highest(x, token, weights, experts, num_experts, scale, HOW)
    else:
        picked = choose(
            x, token, token < tokens, bias, table, token_ids, weights, experts, num_experts, scale, HOW, 1
        )  # fmt: skip
    k = tl.arange(0, HOW.block_k)[None, :]
    place = tl.atomic_add(counts + picked, 1, mask=k < width, sem="relaxed")
    spot = picked.to(tl.int64) * capacity + place
    tl.store(pairs + spot, (t * width + k).to(tl.int32), mask=k < width)


def in_rounds(num_experts: int, how: Choice) -> bool:
    """Whether one warp finds the highest logits."""
    plain = how.score == "softmax" and how.groups == 1 and how.bias_of == "nothing" and not how.hashed
    return plain and num_experts <= MAX_EXPERTS


def chosen_in_lists(
    workspace: Workspace,
    partials: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    rows: int,
    scale: float,
    how: Choice,
) -> tuple[torch.Tensor, torch.Tensor, Lists]:
    """Weights and experts [T, K + S] of `partials` [splits, T, E], and their pairs by expert in tiles of `rows`,
    counted in `counts`, zeros before."""
    splits, t, e = partials.shape
    every, width = len(counts), how.top_k + how.shared
    # a table by token id may name an expert twice
    capacity = t * width if how.hashed else t
    weights = torch.empty(t, width, dtype=torch.float32, device=partials.device)
    experts = torch.empty(t, width, dtype=torch.int32, device=partials.device)
    pairs = torch.empty(every, capacity, dtype=torch.int32, device=partials.device)
    rounds = in_rounds(e, how)
    workspace.launch(choose_and_list, (t,))(
        partials, bias, table, token_ids, weights, experts, counts, pairs, capacity, t, e, scale,
        SPLITS=splits, HOW=how, ROUNDS=rounds, PDL=workspace.pdl, launch_pdl=workspace.pdl,
        num_warps=1 if rounds else 4,
    )  # fmt: skip
    shared, each = how.shared, cdiv(t, rows)
    # a routed expert's further tiles have full ones before them
    tiles = shared * each + e + t * how.top_k // rows
    return weights, experts, Lists(pairs, counts, rows, tiles, shared, each)
