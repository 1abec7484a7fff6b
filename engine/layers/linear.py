"""Projection as a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build import Build
from engine.layers.norm import RmsNorm

# Rows up to which what reads a norm takes it into its own launch.
TAKEN_IN = 16


class Linear(nn.Module):
    """y = residual + act(norm(x) @ weightᵀ + bias), each part only when it is there."""

    def __init__(self, size: int, out: int, build: Build, bias: bool = False, activation: str | None = None) -> None:
        super().__init__()
        self.weight = build.empty(out, size)
        self.bias = build.empty(out) if bias else None
        self._activation = activation
        self._op = build.ops.linear
        self._with_norm = build.ops.linear_norm
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

    def then(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RmsNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y = forward(x, residual=residual), and `norm` of y: None without one, without a residual, and for rows so few
        that whatever reads it does better to take it in; deterministic, that does so for any number of rows, for the
        same bits."""
        if norm is None or residual is None or self._deterministic or len(x) <= TAKEN_IN:
            return self(x, residual=residual), None
        y, normed = self._with_norm(
            x,
            self.weight,
            residual,
            norm.weight,
            norm.eps,
            offset=norm.offset,
            bias=self.bias,
        )
        return y, normed
