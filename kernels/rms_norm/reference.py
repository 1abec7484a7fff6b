"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual sum that precedes it in a decoder."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual;  y = h / sqrt(mean(h²) + eps) * (weight + offset).

    x, residual [T, E], weight [E] → y, h, both [T, E] in x's dtype. Without a residual h is x itself.
    The sum is rounded to x's dtype before it is normed; the norm is computed in float32 and rounded once.
    deterministic: a row's result has the same bits whatever T is.
    """
    h = x if residual is None else x + residual
    f = h.float()
    y = f * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + eps) * (weight.float() + offset)
    return y.to(x.dtype), h
