"""Projection as a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build import Build
from engine.layers.norm import RmsNorm, taken_in
from kernels.borders import NORMED_ROWS


class Linear(nn.Module):
    """y = residual + act(norm(x) @ weightᵀ + bias), each part only when it is there."""

    def __init__(self, size: int, out: int, build: Build, bias: bool = False, activation: str | None = None) -> None:
        super().__init__()
        self.weight = build.weight(out, size)
        self.bias = build.empty(out) if bias else None
        self._activation = activation
        self._op = build.ops.linear
        self._with_norm = build.ops.linear_norm
        self._deterministic = build.deterministic

    def forward(
        self, x: torch.Tensor, norm: RmsNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, size], residual [T, out] → [T, out], or [T, out / 2] behind a gated activation."""
        return self._op(
            x,
            self.weight.value,
            self.bias,
            residual=residual,
            activation=self._activation,
            deterministic=self._deterministic,
            **taken_in(norm),
        )

    def then(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RmsNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y = forward(x, residual=residual), and `norm` of y: None without one, without a residual, and for rows so few
        that whatever reads it does better to take it in; deterministic, that does so for any number of rows, for the
        same bits."""
        if norm is None or residual is None or self._deterministic or len(x) <= NORMED_ROWS:
            return self(x, residual=residual), None
        return self._with_norm(x, self.weight.value, residual, **taken_in(norm), bias=self.bias)
