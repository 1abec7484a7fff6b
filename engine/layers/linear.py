"""Projection as a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build_context import BuildContext
from engine.layers.norm import RmsNorm, taken_in
from engine.parallel.communicator import ALONE
from kernels.thresholds import NORMED_ROWS


class Linear(nn.Module):
    """y = residual + act(norm(x) @ weightᵀ + bias), each part only when it is there.

    partial: the inputs are one rank's of all, and y is the sum over ranks, with residual and bias in it once.
    """

    def __init__(
        self,
        size: int,
        out: int,
        build: BuildContext,
        bias: bool = False,
        activation: str | None = None,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self._communicator = build.communicator if partial else ALONE
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
        on_first_rank = self._communicator.on_first_rank
        y = self._op(
            x,
            self.weight.value,
            on_first_rank(self.bias),
            residual=on_first_rank(residual),
            activation=self._activation,
            deterministic=self._deterministic,
            **taken_in(norm),
        )
        return self._communicator.all_reduce(y)

    def forward_with_next_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RmsNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y = forward(x, residual=residual), and `norm` of y: None without one, without a residual, and for rows so few
        that whatever reads it does better to take it in; deterministic, that does so for any number of rows, for the
        same bits. Of a partial product there is no norm before the sum, and one with it where that `norms`."""
        alone = self._communicator.size == 1
        size = len(x) * self.weight.shape[0] * x.element_size()
        if norm is not None and residual is not None and not self._deterministic and self._communicator.norms(size):
            y = self._op(x, self.weight.value, self._communicator.on_first_rank(self.bias))
            return self._communicator.all_reduce_with_norm(y, residual, norm.weight, norm.eps, norm.offset)
        if norm is None or residual is None or self._deterministic or not alone or len(x) <= NORMED_ROWS:
            return self(x, residual=residual), None
        return self._with_norm(x, self.weight.value, residual, **taken_in(norm), bias=self.bias)
