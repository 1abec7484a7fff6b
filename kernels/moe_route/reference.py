"""Choice and weights of the experts of each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.rms_norm.reference import rms_norm
from kernels.routing import Routing


def moe_route(
    x: torch.Tensor,
    router: torch.Tensor,
    routing: Routing,
    token_ids: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = norm(x), the logits are router · h, and `Routing` says what follows. Of equal values the lower index wins; a
    NaN is never chosen before a number.

    x [T, M]; router [E, M] float32 or in x's dtype; norm_weight [M], which norms x by RMS first (eps, offset as in
    `rms_norm`); token_ids [T] int, read where the routing has a table → h [T, M] in x's dtype, weights [T, K + S]
    float32 and experts [T, K + S] int32, best first. h is rounded to x's dtype, all behind it is computed in float32.
    deterministic: a token's result has the same bits whatever stands beside it.
    """
    h = x if norm_weight is None else rms_norm(x, norm_weight, eps, offset=offset)[0]
    if deterministic and len(x):
        logits = torch.cat([F.linear(row.float(), router.float()) for row in h.split(1)])
    else:
        logits = F.linear(h.float(), router.float())
    if routing.bias is not None and routing.bias_of == "logits":
        logits = logits + routing.bias.float()
    if routing.score == "softmax":
        s = torch.softmax(logits, dim=-1)
    elif routing.score == "sigmoid":
        s = torch.sigmoid(logits)
    else:
        s = F.softplus(logits).sqrt()
    if routing.table is not None:
        assert token_ids is not None
        experts = routing.table[token_ids.long()].long()
    else:
        rank = s if routing.bias is None or routing.bias_of == "logits" else s + routing.bias.float()
        rank = rank.masked_fill(torch.isnan(rank), float("-inf"))
        if routing.num_groups > 1:
            grouped = rank.unflatten(-1, (routing.num_groups, -1))
            worth = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
            best = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
            kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
            rank = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        experts = torch.sort(rank, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    w = s.gather(1, experts)
    if routing.renormalize:
        w = w / (w.sum(dim=-1, keepdim=True) + 1e-20)
    shared = torch.arange(len(router), len(router) + routing.num_shared, device=x.device).expand(len(x), -1)
    numbers = (torch.cat((experts, shared), dim=1) - routing.first).int()
    return h, torch.cat((w * routing.scale, w.new_ones(shared.shape)), dim=1), numbers
