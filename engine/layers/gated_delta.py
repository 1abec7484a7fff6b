"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), with state of fixed size."""

from __future__ import annotations

import torch
from torch import nn

from engine.cache.spec import LayerSpec, Recurrent
from engine.cache.tensors import StateCache
from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.mixer import MixerInput
from engine.models.config import GatedDeltaConfig
from engine.runner.batch import select_last


class GatedDelta(nn.Module):
    """residual + out(gated_norm(delta(conv(qkv)), z)); qkv, z, a and b come from one projection of norm(x).

    Keeps the last inputs of the convolution and one [Dk, Dv] matrix a value head, float32. All between the projections
    is one op.
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
        self.out = Linear(values, hidden, build)
        self._eps = build.config.norm.eps
        self._ops = build.ops
        self._deterministic = build.deterministic
        self.specs: tuple[LayerSpec, ...] = (
            Recurrent(
                ((config.conv_width, channels), (heads, config.key_dim, config.value_dim)),
                (build.dtype_bytes, 4),
            ),
        )

    def forward(self, step: MixerInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Brings the entries' states up to their last token."""
        (cache,) = step.caches
        assert isinstance(cache, StateCache)
        inputs, state = cache.states
        qkv, z, b, a = self.project(step.x, norm=step.norm).split(self._sizes, dim=-1)
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
        return self.out.forward_with_next_norm(select_last(y, step.last_tokens), step.residual, step.next_norm)
