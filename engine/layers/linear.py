"""Projection as a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build import Build
from engine.layers.norm import RmsNorm


class Linear(nn.Module):
    """y = residual + act(norm(x) @ weightᵀ + bias), each part only when it is there."""

    def __init__(self, size: int, out: int, build: Build, bias: bool = False, activation: str | None = None) -> None:
        super().__init__()
        self.weight = build.empty(out, size)
        self.bias = build.empty(out) if bias else None
        self._activation = activation
        self._op = build.ops.linear
        self._deterministic = build.deterministic

    def forward(
        self, x: torch.Tensor, norm: RmsNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, size], residual [T, out] → [T, out], or [T, out / 2] behind a gated activation."""
        weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
        return self._op(
            x,
            self.weight,
            self.bias,
            norm_weight=weight,
            eps=eps,
            offset=offset,
            residual=residual,
            activation=self._activation,
            deterministic=self._deterministic,
        )
