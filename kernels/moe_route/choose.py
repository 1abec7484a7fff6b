# mypy: disable-error-code="no-untyped-def"
"""From scores of experts to the chosen ones and their weights, some tokens at a time, the experts in registers.

Rounds over experts compare integers that are in the order of the values: a warp finds their highest in one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Choice:
    """The constants of a choice, one argument of the kernels that make it: the score, whether it is by token id, how
    many of how many groups, `top_k` routed and `shared` further experts, what powers of two hold those that are chosen,
    all routed ones and the groups, and what is taken off experts' numbers."""

    score: str
    bias_of: Literal["nothing", "choice", "logits"]
    hashed: bool
    groups: int
    top_groups: int
    top2: bool
    renormalize: bool
    top_k: int
    shared: int
    block_k: int
    block_e: int
    block_g: int
    first: int = 0


@triton.jit
def summed(
    partials,
    token,
    tokens,
    num_experts,
    SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The logits of token [BLOCK_T] from partials [SPLITS, tokens, E]: [BLOCK_T, BLOCK_E], −∞ past the last expert."""
    e = tl.arange(0, BLOCK_E)[None, :]
    live = (token < tokens)[:, None] & (e < num_experts)
    own = token[:, None] * num_experts + e
    x = tl.load(partials + own, mask=live, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(partials + split * tokens.to(tl.int64) * num_experts + own, mask=live, other=0.0)
    return tl.where(e < num_experts, x, float("-inf"))


@triton.jit
def choose(
    x,
    token,
    live_token,
    bias,
    table,
    token_ids,
    weights,
    experts,
    num_experts,
    scale,
    HOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """HOW is a `Choice`. x [BLOCK_T, block_e] are the logits, −∞ past the last expert; token [BLOCK_T] says whose they
    are. Gives the experts that it stores, [BLOCK_T, block_k]."""
    K: tl.constexpr = HOW.top_k
    BLOCK_K: tl.constexpr = HOW.block_k
    BLOCK_E: tl.constexpr = HOW.block_e
    GROUPS: tl.constexpr = HOW.groups
    TOP_GROUPS: tl.constexpr = HOW.top_groups
    e = tl.arange(0, BLOCK_E)[None, :]
    live = e < num_experts
    if HOW.bias_of == "logits":
        x += tl.load(bias + e, mask=live, other=0.0).to(tl.float32)
    if HOW.score == "softmax":
        s = tl.exp(x - tl.max(x, 1)[:, None])
        s = s / tl.sum(s, 1)[:, None]
    elif HOW.score == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-x))
    else:
        # log(1 + eˣ) without overflow; eˣ itself where 1 + eˣ rounds to 1.
        s = tl.sqrt(tl.where(x < -15.0, tl.exp(x), tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))))

    width: tl.constexpr = K + HOW.shared
    k = tl.arange(0, BLOCK_K)[None, :]
    chosen = k < K
    picked = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    value = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    if HOW.hashed:
        row = tl.load(token_ids + token, mask=live_token, other=0).to(tl.int64)
        picked = tl.load(table + row[:, None] * K + k, mask=chosen & live_token[:, None], other=0).to(tl.int32)
        for i in tl.static_range(K):
            expert = tl.sum(tl.where(k == i, picked, 0), 1)[:, None]
            value = tl.where(k == i, tl.sum(tl.where(e == expert, s, 0.0), 1)[:, None], value)
    else:
        rank = s
        if HOW.bias_of == "choice":
            rank += tl.load(bias + e, mask=live, other=0.0).to(tl.float32)
        # Three floors keep experts distinct when values are missing: NaN, other groups, taken or padding.
        rank = tl.where(rank != rank, -3.0e38, rank)
        rank = tl.where(live, rank, float("-inf"))
        if GROUPS > 1:
            group = e // (num_experts // GROUPS)
            g = tl.arange(0, HOW.block_g)[None, :]
            worth = tl.full((BLOCK_T, HOW.block_g), float("-inf"), tl.float32)
            for i in tl.static_range(GROUPS):
                inside = tl.where((group == i) & live, rank, float("-inf"))
                best = tl.max(inside, 1)
                if HOW.top2:
                    best += tl.max(tl.where(e == tl.argmax(inside, 1)[:, None], float("-inf"), inside), 1)
                worth = tl.where(g == i, best[:, None], worth)
            kept = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
            for _ in tl.static_range(TOP_GROUPS):
                best_group = tl.argmax(worth, 1)[:, None]
                kept = tl.where(group == best_group, 1, kept)
                worth = tl.where(g == best_group, float("-inf"), worth)
            rank = tl.where((kept == 1) | (rank == float("-inf")), rank, -3.2e38)
        if BLOCK_T == 1 and BLOCK_E <= 128:
            # All places at once: an expert's is the number of those that go before it.
            mine, others = tl.trans(rank), rank
            before = (others > mine) | ((others == mine) & (e < tl.trans(e)))
            place = tl.sum(before.to(tl.int32), 1)[:, None]
            here = (place == k) & chosen
            picked = tl.sum(tl.where(here, tl.trans(e), 0), 0)[None, :]
            value = tl.sum(tl.where(here, tl.trans(s), 0.0), 0)[None, :]
        else:
            bits = tl.where(rank == 0.0, 0.0, rank).to(tl.int32, bitcast=True)
            key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            own = s.to(tl.int32, bitcast=True)
            worths = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
            for i in tl.static_range(K):
                best = tl.min(tl.where(key == tl.max(key, 1)[:, None], e, BLOCK_E), 1)[:, None]
                picked = tl.where(k == i, best, picked)
                worths = tl.where(k == i, tl.sum(tl.where(e == best, own, 0), 1)[:, None], worths)
                # below −∞, which padding has
                key = tl.where(e == best, -0x7FFFFFFF, key)
            value = worths.to(tl.float32, bitcast=True)
    if HOW.renormalize:
        value = value / (tl.sum(value, 1)[:, None] + 1e-20)
    value = value * scale
    if HOW.shared > 0:
        picked = tl.where(chosen, picked, num_experts + k - K)
        value = tl.where(chosen, value, 1.0)
    if HOW.first > 0:
        picked -= HOW.first
    out = token.to(tl.int64)[:, None] * width + k
    stored = (k < width) & live_token[:, None]
    tl.store(weights + out, value, mask=stored)
    tl.store(experts + out, picked, mask=stored)
    return picked
