"""Matrix product with weights stored as [out, in]."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x @ weightᵀ + bias.  x [T, K], weight [N, K], bias [N] → [T, N] in x's dtype, accumulated in float32."""
    return torch.nn.functional.linear(x, weight, bias)
