"""Projection as a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build_context import BuildContext
from engine.layers.norm import RmsNorm, taken_in
from engine.parallel.communicator import ALONE
from kernels.thresholds import NORMED_ROWS


class Linear(nn.Module):
    """y = residual + norm(x) @ weightᵀ + bias, each part only when it is there.

    partial: the inputs are one rank's of all, and y is the sum over ranks, with residual and bias in it once.
    """

    def __init__(
        self,
        size: int,
        out: int,
        build: BuildContext,
        bias: bool = False,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self.communicator = build.communicator if partial else ALONE
        self.weight = build.weight(out, size)
        self.bias = build.empty(out) if bias else None
        self._op = build.ops.linear
        self._with_norm = build.ops.linear_norm
        self._deterministic = build.deterministic

    def forward(
        self, x: torch.Tensor, norm: RmsNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, size], residual [T, out] → [T, out]."""
        on_first_rank = self.communicator.on_first_rank
        y = self._op(
            x,
            self.weight.value,
            on_first_rank(self.bias),
            residual=on_first_rank(residual),
            deterministic=self._deterministic,
            **taken_in(norm),
        )
        return self.communicator.all_reduce(y)

    def forward_with_next_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RmsNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y = forward(x, residual=residual), and `norm` of y: None without one, without a residual, and where whatever
        reads it does better to take it in: for few rows, and where its inputs are rounded, which norms them on the way;
        deterministic, that does so for any number of rows, for the same bits. Of a partial product there is no norm
        before the sum, and one with it where that `norms`."""
        alone = self.communicator.size == 1
        row = self.weight.shape[0] * x.element_size()
        inside = not self._deterministic and self.communicator.norms(len(x) * row, row)
        if norm is not None and residual is not None and inside:
            y = self._op(x, self.weight.value, self.communicator.on_first_rank(self.bias))
            return self.communicator.all_reduce_with_norm(y, residual, norm.weight, norm.eps, norm.offset)
        taken_in_later = self._deterministic or len(x) <= NORMED_ROWS or self.weight.value.rounds_inputs
        if norm is None or residual is None or not alone or taken_in_later:
            return self(x, residual=residual), None
        return self._with_norm(x, self.weight.value, residual, **taken_in(norm), bias=self.bias)
