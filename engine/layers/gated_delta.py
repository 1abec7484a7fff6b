"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), with state of fixed size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from engine.cache.spec import LayerSpec, Recurrent
from engine.cache.tensors import StateCache
from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.mixer import MixerInput
from engine.models.config import GatedDeltaConfig
from engine.runner.batch import DeviceBatch, select_last
from kernels.batch import AttentionBatch


class GatedDelta(nn.Module):
    """residual + out(gated_norm(delta(conv(qkv)), z)); qkv, z, a and b come from one projection of norm(x).

    Keeps the last inputs of the convolution, with as many more as tokens may be taken back, and one [Dk, Dv] matrix a
    value head, float32. All between the projections is one op, where all tokens stand.
    """

    def __init__(self, config: GatedDeltaConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        hidden, heads = build.config.hidden, config.num_value_heads
        values = heads * config.value_dim
        channels = 2 * config.num_key_heads * config.key_dim + values
        self._sizes = (channels, values, heads, heads)
        self.project = Linear(hidden, sum(self._sizes), build)
        self.conv = build.empty(channels, 1, config.conv_width)
        self.a_log = build.empty(heads, dtype=torch.float32)
        self.dt_bias = build.empty(heads, dtype=torch.float32)
        self.norm = build.empty(config.value_dim)
        self.out = Linear(values, hidden, build, partial=True)
        self._eps = build.config.norm.eps
        self._ops = build.ops
        self._deterministic = build.deterministic
        self.specs: tuple[LayerSpec, ...] = (
            Recurrent(
                ((config.conv_width + build.drafts, channels), (heads, config.key_dim, config.value_dim)),
                (build.dtype_bytes, 4),
            ),
        )

    def forward(self, step: MixerInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Brings the entries' states up to their last token, or defers that where not all tokens may stand."""
        (cache,) = step.caches
        assert isinstance(cache, StateCache)
        inputs, state = cache.states
        qkv, z, b, a = self.project(step.x, norm=step.norm).split(self._sizes, dim=-1)
        if step.batch.deferred is None:
            y = self._ops.delta_net(
                qkv,
                z,
                a,
                b,
                self.conv[:, 0],
                inputs,
                self.a_log,
                self.dt_bias,
                state,
                self.norm,
                self._eps,
                step.batch.state_slots,
                step.batch.attention,
                self.config.num_key_heads,
                deterministic=self._deterministic,
            )
        else:
            attention = step.batch.attention
            x = self._ops.causal_conv(
                qkv, self.conv[:, 0], inputs, step.batch.state_slots, attention, deterministic=self._deterministic
            )
            o = self._delta(x, a, b, state, step.batch, attention)
            y = self._ops.gated_norm(o, z, self.norm, self._eps)
            step.batch.deferred.append(partial(self._advance, x, a, b, state, step.batch))
        return self.out.forward_with_next_norm(select_last(y, step.last_tokens), step.residual, step.next_norm)

    def _advance(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state: torch.Tensor,
        batch: DeviceBatch,
        num_kept: torch.Tensor,
    ) -> None:
        """Bring states up to each entry's first `num_kept` tokens [B], from what the convolution gave for them."""
        self._delta(x, a, b, state, batch, replace(batch.attention, num_kept=num_kept), states_only=True)

    def _delta(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state: torch.Tensor,
        batch: DeviceBatch,
        attention: AttentionBatch,
        states_only: bool = False,
    ) -> torch.Tensor | None:
        """The delta rule over x [T, channels], the states left where `attention` says."""
        given = (x, a, b, self.a_log, self.dt_bias, state, batch.state_slots, attention, self.config.num_key_heads)
        out: torch.Tensor | None = self._ops.gated_delta(
            *given, deterministic=self._deterministic, states_only=states_only
        )
        return out
