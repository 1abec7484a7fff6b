"""Choice and weights of the routed experts of each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
    """s = score(logits);  the K largest of s + bias are chosen;  w = s[chosen] (/ Σ s[chosen]) · scale.

    score: "softmax", "sigmoid" or "sqrtsoftplus" (√ln(1 + eˣ)). With groups, experts outside of the `top_groups` best
    groups are not chosen; a group is worth the "max" or the sum of the "top2" of its s + bias (DeepSeek-V3 2024,
    arXiv:2412.19437). A `table` gives the choice by token id instead. Of equal values the lower index wins; a NaN is
    never chosen before a number.

    logits [T, E]; bias [E] float32; table [V, K] int; token_ids [T] int → weights [T, K] float32 and experts [T, K]
    int32, best first. Computed in float32.
    """
    x = logits.float()
    if score == "softmax":
        s = torch.softmax(x, dim=-1)
    elif score == "sigmoid":
        s = torch.sigmoid(x)
    else:
        s = F.softplus(x).sqrt()
    if table is not None:
        assert token_ids is not None
        experts = table[token_ids.long()].long()
    else:
        rank = s if bias is None else s + bias.float()
        rank = rank.masked_fill(torch.isnan(rank), float("-inf"))
        if num_groups > 1:
            grouped = rank.unflatten(-1, (num_groups, -1))
            worth = grouped.amax(-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
            best = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, :top_groups]
            kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
            rank = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        experts = torch.sort(rank, dim=-1, descending=True, stable=True).indices[:, :top_k]
    w = s.gather(1, experts)
    if renormalize:
        w = w / (w.sum(dim=-1, keepdim=True) + 1e-20)
    return w * scale, experts.int()
