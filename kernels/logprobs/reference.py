"""Log-probabilities of the chosen token and of the likeliest ones."""

from __future__ import annotations

import torch

MAX_K = 64


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log p(t) = x_t − log Σ exp(x), in float32; tokens rank by descending logit, then by ascending id.

    logits [B, V], tokens [B] int64, 0 ≤ k ≤ min(V, 64) → ids [B, k+1] int64, logprobs [B, k+1] float32,
    ranks [B, k+1] int64 (1 is the likeliest). Column 0 is the given token, columns 1 … k the k likeliest in order.
    Raises ValueError for another k.
    """
    if not 0 <= k <= min(MAX_K, logits.shape[1]):
        raise ValueError(f"logprobs of the {k} likeliest tokens were asked for: use 0 to {min(MAX_K, logits.shape[1])}")
    x = logits.float()
    chosen = tokens.long()[:, None]
    value = x.gather(1, chosen)
    earlier = torch.arange(x.shape[1], device=x.device)[None] < chosen
    rank = 1 + ((x > value) | ((x == value) & earlier)).sum(dim=-1, keepdim=True)
    likeliest = x.argsort(dim=-1, descending=True, stable=True)[:, :k]
    ids = torch.cat((chosen, likeliest), dim=1)
    ranks = torch.cat((rank, torch.arange(1, k + 1, device=x.device)[None].expand(x.shape[0], k)), dim=1)
    return ids, x.gather(1, ids) - torch.logsumexp(x, dim=-1, keepdim=True), ranks
