"""Choice and weights of the experts of each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.rms_norm.reference import rms_norm


def moe_route(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    renormalize: bool = True,
    scale: float = 1.0,
    num_shared: int = 0,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = norm(x);  s = score(router · h);  the K largest of s + bias are chosen;
    w = s[chosen] (/ Σ s[chosen]) · scale.

    score: "softmax", "sigmoid" or "sqrtsoftplus" (√ln(1 + eˣ)). With groups, experts outside of the `top_groups` best
    groups are not chosen; a group is worth the "max" or the sum of the "top2" of its s + bias (DeepSeek-V3 2024,
    arXiv:2412.19437). A `table` gives the choice by token id instead. Of equal values the lower index wins; a NaN is
    never chosen before a number. Behind the chosen experts come `num_shared` shared ones, numbered from E on, of
    weight 1.

    x [T, M]; router [E, M] float32 or in x's dtype; norm_weight [M], which norms x by RMS first (eps, offset as in
    `rms_norm`); bias [E] float32; table [V, K] int; token_ids [T] int → h [T, M] in x's dtype, weights [T, K + S]
    float32 and experts [T, K + S] int32, best first. h is rounded to x's dtype, all behind it is computed in float32.
    deterministic: a token's result has the same bits whatever stands beside it.
    """
    h = x if norm_weight is None else rms_norm(x, norm_weight, eps, offset=offset)[0]
    if deterministic and len(x):
        logits = torch.cat([F.linear(row.float(), router.float()) for row in h.split(1)])
    else:
        logits = F.linear(h.float(), router.float())
    if score == "softmax":
        s = torch.softmax(logits, dim=-1)
    elif score == "sigmoid":
        s = torch.sigmoid(logits)
    else:
        s = F.softplus(logits).sqrt()
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
    shared = torch.arange(len(router), len(router) + num_shared, device=x.device).expand(len(x), -1)
    return h, torch.cat((w * scale, w.new_ones(shared.shape)), dim=1), torch.cat((experts, shared), dim=1).int()
