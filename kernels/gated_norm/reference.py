"""RMS norm of each head, times an activated gate (as linear attention ends)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / √(mean x² + eps) ∘ weight ∘ silu(gate), a head at a time.

    x [T, H, D]; gate [T, H·D]; weight [D] → [T, H·D] in x's dtype. Computed in float32, rounded once.
    """
    f = x.float()
    f = f * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    return (f.flatten(1) * F.silu(gate.float())).to(x.dtype)
