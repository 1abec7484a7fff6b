"""RMS norm as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.layers.build_context import BuildContext


class RmsNorm(nn.Module):
    """y = x / rms(x) * (weight + offset). A projection may take the norm in instead (`Linear.forward`)."""

    def __init__(self, size: int, build: BuildContext, eps: float | None = None) -> None:
        """eps None takes the model's."""
        super().__init__()
        self.weight = build.empty(size)
        self.eps = build.config.norm.eps if eps is None else eps
        self.offset = build.config.norm.offset
        self._deterministic = build.deterministic
        self._op = build.ops.rms_norm
        self._add = build.ops.norm_add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] → [T, size]."""
        y, _ = self._op(x, self.weight, self.eps, offset=self.offset, deterministic=self._deterministic)
        return y

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + y(x), both [T, size]."""
        return self._add(x, self.weight, self.eps, residual, offset=self.offset)


def taken_in(norm: RmsNorm | None) -> dict[str, Any]:
    """What an op is told of the norm that it takes in; nothing to norm when None."""
    return {} if norm is None else {"norm_weight": norm.weight, "eps": norm.eps, "offset": norm.offset}
