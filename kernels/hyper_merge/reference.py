"""Manifold-constrained hyper-connections (Xie et al. 2026): from the output of a layer part to residual streams."""

from __future__ import annotations

import torch


def hyper_merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """y[t, n] = post[t, n] · x[t] + Σⱼ comb[t, j, n] · streams[t, j].

    x [T, E]; streams [T, N, E]; post [T, N], comb [T, N, N] float32 → [T, N, E] in streams' dtype, computed in float32.
    """
    mixed = comb.float().transpose(1, 2) @ streams.float()
    return (post.float()[..., None] * x.float()[:, None] + mixed).to(streams.dtype)
