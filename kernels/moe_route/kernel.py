"""Choice and weights of the routed experts: one program a token, the experts in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}


@triton.jit
def _route(
    logits,
    bias,
    table,
    token_ids,
    weights,
    experts,
    num_experts,
    stride,
    scale,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HASHED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    live = e < num_experts
    x = tl.load(logits + t * stride + e, mask=live, other=float("-inf")).to(tl.float32)
    if SCORE == 0:
        s = tl.exp(x - tl.max(x, 0))
        s = s / tl.sum(s, 0)
    elif SCORE == 1:
        s = 1.0 / (1.0 + tl.exp(-x))
    else:
        # log(1 + eˣ) without overflow; eˣ itself where 1 + eˣ rounds to 1.
        s = tl.sqrt(tl.where(x < -15.0, tl.exp(x), tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))))

    k = tl.arange(0, BLOCK_K)
    picked = tl.zeros((BLOCK_K,), tl.int32)
    value = tl.zeros((BLOCK_K,), tl.float32)
    if HASHED:
        token = tl.load(token_ids + t).to(tl.int64)
        picked = tl.load(table + token * K + k, mask=k < K, other=0).to(tl.int32)
        for i in tl.static_range(K):
            chosen = tl.sum(tl.where(k == i, picked, 0), 0)
            value = tl.where(k == i, tl.sum(tl.where(e == chosen, s, 0.0), 0), value)
    else:
        rank = s
        if HAS_BIAS:
            rank += tl.load(bias + e, mask=live, other=0.0).to(tl.float32)
        # Three floors keep experts distinct when values are missing: NaN, other groups, taken or padding.
        rank = tl.where(rank != rank, -3.0e38, rank)
        rank = tl.where(live, rank, float("-inf"))
        if GROUPS > 1:
            group = e // (num_experts // GROUPS)
            g = tl.arange(0, BLOCK_G)
            worth = tl.full((BLOCK_G,), float("-inf"), tl.float32)
            for i in tl.static_range(GROUPS):
                inside = tl.where((group == i) & live, rank, float("-inf"))
                best = tl.max(inside, 0)
                if TOP2:
                    best += tl.max(tl.where(e == tl.argmax(inside, 0), float("-inf"), inside), 0)
                worth = tl.where(g == i, best, worth)
            kept = tl.zeros((BLOCK_E,), tl.int32)
            for _ in tl.static_range(TOP_GROUPS):
                best_group = tl.argmax(worth, 0)
                kept = tl.where(group == best_group, 1, kept)
                worth = tl.where(g == best_group, float("-inf"), worth)
            rank = tl.where((kept == 1) | (rank == float("-inf")), rank, -3.2e38)
        for i in tl.static_range(K):
            best = tl.argmax(rank, 0)
            picked = tl.where(k == i, best, picked)
            value = tl.where(k == i, tl.sum(tl.where(e == best, s, 0.0), 0), value)
            rank = tl.where(e == best, float("-inf"), rank)
    if RENORMALIZE:
        value = value / (tl.sum(value, 0) + 1e-20)
    tl.store(weights + t * K + k, value * scale, mask=k < K)
    tl.store(experts + t * K + k, picked, mask=k < K)


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    renormalize: bool = True,
    scale: float = 1.0,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    t, e = logits.shape
    weights = torch.empty(t, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(t, top_k, dtype=torch.int32, device=logits.device)
    if t:
        _route[(t,)](
            logits,
            bias,
            table,
            token_ids,
            weights,
            experts,
            e,
            logits.stride(0),
            scale,
            SCORE=SCORES[score],
            HAS_BIAS=bias is not None,
            HASHED=table is not None,
            GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            TOP2=group_score == "top2",
            RENORMALIZE=renormalize,
            K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK_E=triton.next_power_of_2(e),
            BLOCK_G=triton.next_power_of_2(num_groups),
            num_warps=1 if e <= 128 else 4,
        )
    return weights, experts
