"""Gated feed-forward part (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.models.config import MlpConfig


class Mlp(nn.Module):
    """residual + down(act(gate(norm(x))) * up(norm(x))), gate and up as one matrix. summed False leaves the sum over
    ranks to the caller."""

    def __init__(self, config: MlpConfig, build: BuildContext, summed: bool = True) -> None:
        super().__init__()
        hidden, inner = build.config.hidden, config.intermediate
        self._config = config
        # The product's own activation does not clip.
        fused = config.activation if config.limit is None else None
        self.gate_up = Linear(hidden, 2 * inner, build, config.bias, activation=fused)
        self._gated_activation = build.ops.gated_activation
        self.down = Linear(inner, hidden, build, config.bias, partial=summed)

    def forward(
        self, x: torch.Tensor, norm: RmsNorm | None, token_ids: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """x, residual [T, hidden] → [T, hidden]. norm None takes x as it is."""
        h = self.gate_up(x, norm=norm)
        if self._config.limit is not None:
            h = self._gated_activation(h, self._config.activation, limit=self._config.limit)
        return self.down(h, residual=residual)
