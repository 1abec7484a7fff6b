"""A matrix product for each group of channels, as attention's output is brought down to a smaller rank by groups."""

from __future__ import annotations

import torch


def group_linear(x: torch.Tensor, weight: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    """y[t, g] = weight[g] · x[t, g].  x [T, G·K], weight [G, R, K] → [T, G·R] in x's dtype, accumulated in float32.

    deterministic: a token's result has the same bits whatever T is.
    """
    if deterministic and len(x) > 1:
        return torch.cat([group_linear(row, weight) for row in x.split(1)])
    groups, _, size = weight.shape
    return torch.einsum("tgk,grk->tgr", x.view(-1, groups, size), weight).flatten(1)
