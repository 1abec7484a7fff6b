"""A gate on the output of attention."""

from __future__ import annotations

import torch


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y = x ∘ sigmoid(gate).  x, gate [T, N] → [T, N] in x's dtype, computed in float32."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)
