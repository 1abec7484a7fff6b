"""Gated feed-forward part (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build import Build
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.models.config import MlpConfig
from engine.runner.batch import DeviceBatch


class Mlp(nn.Module):
    """residual + down(act(gate(norm(x))) * up(norm(x))), gate and up as one matrix."""

    def __init__(self, config: MlpConfig, build: Build) -> None:
        super().__init__()
        if config.limit is not None:
            raise NotImplementedError("a dense feed-forward part that clips its gate is not implemented")
        hidden, inner = build.config.hidden, config.intermediate
        self.gate_up = Linear(hidden, 2 * inner, build, config.bias, activation=config.activation)
        self.down = Linear(inner, hidden, build, config.bias)

    def forward(
        self, x: torch.Tensor, norm: RmsNorm | None, batch: DeviceBatch, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """x, residual [T, hidden] → [T, hidden]. norm None takes x as it is."""
        return self.down(self.gate_up(x, norm=norm), residual=residual)
