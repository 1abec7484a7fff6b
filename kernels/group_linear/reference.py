"""A matrix product for each group of channels, as attention's output is brought down to a smaller rank by groups."""

from __future__ import annotations

import torch

from kernels.weight import Weight


def group_linear(x: torch.Tensor, weight: Weight, deterministic: bool = False) -> torch.Tensor:
    """y[t, g] = weight[g] · x[t, g].  x [T, G·K], weight [G, R, K] → [T, G·R] in x's dtype, accumulated in float32.

    The weight's numbers are rounded to x's dtype (`Weight.dense`), x is taken as it is: a quantized weight's `inputs`
    are not looked at.
    deterministic: a token's result has the same bits whatever T is.
    """
    return _product(x, weight.dense(x.dtype), deterministic)


def _product(x: torch.Tensor, numbers: torch.Tensor, deterministic: bool) -> torch.Tensor:
    if deterministic and len(x) > 1:
        return torch.cat([_product(row, numbers, False) for row in x.split(1)])
    groups, _, size = numbers.shape
    return torch.einsum("tgk,grk->tgr", x.view(-1, groups, size), numbers).flatten(1)
