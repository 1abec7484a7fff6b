"""Manifold-constrained hyper-connections (Xie et al. 2026): from residual streams to the input of a layer part."""

from __future__ import annotations

import torch


def hyper_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    iterations: int,
    eps: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m = fn · x / √(mean x² + norm_eps) over the N·E values x of a token, in three parts:

        pre  = sigmoid(m₀ · scale₀ + base₀) + eps          [N]      input = Σₙ preₙ xₙ
        post = 2 sigmoid(m₁ · scale₁ + base₁)              [N]
        comb = softmax(m₂ · scale₂ + base₂) + eps          [N, N]   its columns, then `iterations` − 1 times rows and
                                                                    columns, divided by their sum + eps
    streams [T, N, E]; fn [N(2 + N), N·E], base [N(2 + N)], scale [3] float32 → input [T, E] in streams' dtype,
    post [T, N] and comb [T, N, N] float32. Computed in float32.
    deterministic: a token's results have the same bits whatever T is.
    """
    t, n, _ = streams.shape
    x = streams.flatten(1).float()
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm_eps)
    rows = x.split(1) if deterministic and t else (x,)
    m = torch.cat([row @ fn.float().T for row in rows])
    pre, post, comb = m.split((n, n, n * n), dim=-1)
    base_pre, base_post, base_comb = base.float().split((n, n, n * n))
    scale_pre, scale_post, scale_comb = scale.float().unbind()
    pre = torch.sigmoid(pre * scale_pre + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale_post + base_post)
    comb = torch.softmax((comb * scale_comb + base_comb).view(t, n, n), dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return (pre[..., None] * streams.float()).sum(dim=1).to(streams.dtype), post, comb
