"""Gated feed-forward part (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm, taken_in
from engine.models.config import MlpConfig


class Mlp(nn.Module):
    """residual + down(act(gate(norm(x))) * up(norm(x))), gate and up as one matrix. summed False leaves the sum over
    ranks to the caller."""

    def __init__(self, config: MlpConfig, build: BuildContext, summed: bool = True) -> None:
        super().__init__()
        hidden, inner = build.config.hidden, config.intermediate
        self._config = config
        self.gate_up = Linear(hidden, 2 * inner, build, config.bias)
        self.down = Linear(inner, hidden, build, config.bias, partial=summed)
        self._op = build.ops.gated_mlp
        self._deterministic = build.deterministic

    def forward(
        self, x: torch.Tensor, norm: RmsNorm | None, token_ids: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """x, residual [T, hidden] → [T, hidden]. norm None takes x as it is."""
        once = self.down.communicator.on_first_rank
        y: torch.Tensor = self._op(
            x,
            self.gate_up.weight.value,
            self.down.weight.value,
            self._config.activation,
            self._config.limit,
            gate_up_bias=self.gate_up.bias,
            down_bias=once(self.down.bias),
            residual=once(residual),
            deterministic=self._deterministic,
            **taken_in(norm),
        )
        return self.down.communicator.all_reduce(y)
