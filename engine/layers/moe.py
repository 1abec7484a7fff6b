"""Routed experts beside a shared one (Shazeer et al. 2017, arXiv:1701.06538; arXiv:2401.06066)."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build import Build
from engine.layers.mlp import Mlp
from engine.layers.norm import RmsNorm
from engine.models.config import MlpConfig, MoeConfig
from engine.runner.batch import DeviceBatch


class Moe(nn.Module):
    """residual + Σ weight · expert(norm(x)) + shared(norm(x)). Routing is computed in float32."""

    def __init__(self, config: MoeConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        hidden, count, inner = build.config.hidden, config.num_experts, config.intermediate
        self.router = build.empty(count, hidden, dtype=torch.float32)
        self.correction = build.empty(count, dtype=torch.float32) if config.correction_bias else None
        self.table = (
            build.empty(build.config.vocab_size, config.top_k, dtype=torch.int32, below=count)
            if config.hashed
            else None
        )
        self.gate_up = build.empty(count, 2 * inner, hidden)
        self.down = build.empty(count, hidden, inner)
        shared = MlpConfig(config.shared_intermediate, config.activation, limit=config.limit)
        self.shared = Mlp(shared, build) if config.shared_intermediate else None
        self._deterministic = build.deterministic
        self._ops = build.ops

    def forward(
        self, x: torch.Tensor, norm: RmsNorm, batch: DeviceBatch, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """x, residual [T, hidden] → [T, hidden]."""
        config = self.config
        h = norm(x)
        weights, experts = self._ops.moe_route(
            self._ops.linear(h.float(), self.router, deterministic=self._deterministic),
            config.top_k,
            score=config.score,
            bias=self.correction,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_score=config.group_score,
            renormalize=config.renormalize,
            scale=config.scale,
            table=self.table,
            token_ids=batch.token_ids,
        )
        y = self._ops.moe_gemm(
            h,
            self.gate_up,
            self.down,
            weights,
            experts,
            activation=config.activation,
            limit=config.limit,
            deterministic=self._deterministic,
        )
        if self.shared is not None:
            y = self.shared(h, None, batch, residual=y)
        return y if residual is None else residual + y
