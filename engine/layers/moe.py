"""Routed experts beside shared ones (Shazeer et al. 2017, arXiv:1701.06538; arXiv:2401.06066)."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build_context import BuildContext
from engine.layers.mlp import Mlp
from engine.layers.norm import RmsNorm, taken_in
from engine.models.config import MlpConfig, MoeConfig
from kernels.routing import ExpertBiases, Routing


class Moe(nn.Module):
    """residual + Σ weight · expert(norm(x)). Routing is computed in float32, of routers that keep all their bits
    (`BuildContext.router_dtype`). Shared experts stand behind the others in the same tables, are chosen by every token
    and weigh 1; those that are stored in another way are one feed-forward part of their own."""

    def __init__(self, config: MoeConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        hidden, count, inner = build.config.hidden, config.num_experts, config.intermediate
        self.router = build.empty(count, hidden, dtype=build.router_dtype or torch.float32)
        self.correction = build.empty(count, dtype=torch.float32) if config.correction_bias else None
        self.table = build.empty(build.config.vocab_size, config.top_k, dtype=torch.int32) if config.hashed else None
        self.router_bias = build.empty(count, dtype=torch.float32) if config.router_bias else None
        self.gate_up_bias = build.empty(len(config.experts), 2 * inner) if config.bias else None
        self.down_bias = build.empty(len(config.experts), hidden) if config.bias else None
        here = len(config.experts) + config.num_behind
        self.gate_up = build.weight(here, 2 * inner, hidden)
        self.down = build.weight(here, hidden, inner)
        beside = config.num_shared - config.num_behind
        apart = MlpConfig(config.shared_inner or beside * inner, config.activation, limit=config.limit)
        self.shared = Mlp(apart, build, summed=False) if beside else None
        self._communicator = build.communicator
        self._deterministic = build.deterministic
        self._ops = build.ops

    @property
    def bounds(self) -> dict[str, int]:
        """Parameters that hold ids, and what these are below."""
        return {} if self.table is None else {"table": self.config.num_experts}

    @property
    def idle(self) -> float:
        """The part of the experts that a token does not choose."""
        return (self.config.num_experts - self.config.top_k) / (self.config.num_experts + self.config.num_behind)

    def forward(
        self, x: torch.Tensor, norm: RmsNorm | None, token_ids: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """x, residual [T, hidden] → [T, hidden]. norm None takes x as it is."""
        config = self.config
        routing = Routing(
            config.top_k,
            config.score,
            self.correction if self.router_bias is None else self.router_bias,
            config.num_groups,
            config.top_groups,
            config.group_score,
            config.renormalize,
            config.scale,
            config.num_behind,
            self.table,
            config.experts.start,
            "choice" if self.router_bias is None else "logits",
        )
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = ExpertBiases(self.gate_up_bias, self.down_bias)
        y = self._ops.moe(
            x,
            self.router,
            self.gate_up.value,
            self.down.value,
            routing,
            token_ids,
            residual=self._communicator.on_first_rank(residual),
            activation=config.activation,
            limit=config.limit,
            deterministic=self._deterministic,
            biases=biases,
            **taken_in(norm),
        )
        # In this order, for the sum may stand in its residual's place, and x may be the residual of the routed ones.
        if self.shared is not None:
            y = self.shared(x, norm, token_ids, residual=y)
        return self._communicator.all_reduce(y)
