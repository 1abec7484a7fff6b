"""Feed-forward parts of the routed experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def moe_gemm(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
    limit: float | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """y[t] = Σₖ w[t,k] · down[e] · (act(g) ∘ u),  (g, u) = gate_up[e] · x[t],  e = experts[t,k].

    With a limit, g is clipped above and u on both sides before the activation.

    x [T, M]; gate_up [E, 2F, M] (gate, then up); down [E, M, F]; weights [T, K] float32; experts [T, K] int32, an
    expert outside of [0, E) adds nothing → [T, M] in x's dtype. Products accumulate in float32; act(g) ∘ u is rounded
    to x's dtype, the sum over k is taken in float32 and rounded once.
    deterministic: a token's result has the same bits whatever stands beside it.
    """
    if deterministic and len(x) > 1:
        rows = zip(x.split(1), weights.split(1), experts.split(1), strict=True)
        return torch.cat([moe_gemm(*row[:1], gate_up, down, *row[1:], activation, limit) for row in rows])
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat = experts.flatten().long()
    order = torch.argsort(flat, stable=True)
    hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
    lo = 0
    for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
        pairs = order[lo : lo + count]
        lo += count
        if not 0 <= expert < gate_up.shape[0]:
            continue
        tokens = pairs // experts.shape[1]
        g, u = F.linear(x[tokens], gate_up[expert]).float().chunk(2, dim=-1)
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        act = F.silu(g) if activation == "silu" else F.gelu(g, approximate="tanh")
        y = F.linear((act * u).to(x.dtype), down[expert]).float()
        out.index_add_(0, tokens, y * weights.flatten()[pairs, None])
    return out.to(x.dtype)
