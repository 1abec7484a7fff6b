"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) over a paged KV cache."""

from __future__ import annotations

import torch
from torch import nn

from engine.cache.spec import LayerSpec, PagedKV
from engine.cache.tensors import PagedCache
from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.mixer import MixerInput
from engine.models.config import AttentionConfig
from engine.runner.batch import select_last
from kernels.batch import AttentionBatch
from kernels.rope import Rope


class Attention(nn.Module):
    """residual + out(attend(norm(x))): one projection to q, k and v, then one op for all up to the projection out."""

    def __init__(self, config: AttentionConfig, build: BuildContext, inputs: int | None = None) -> None:
        """inputs: width of x; None takes the model's."""
        super().__init__()
        self.config = config
        hidden, d = build.config.hidden, config.head_dim
        # The gate stands behind q, k and v.
        self._sizes = ((config.num_heads + 2 * config.num_kv_heads) * d, config.num_heads * d if config.gated else 0)
        self.qkv = Linear(inputs or hidden, sum(self._sizes), build, config.bias)
        self.out = Linear(config.num_heads * d, hidden, build, config.output_bias, partial=True)
        self.q_norm = build.empty(d) if config.qk_norm else None
        self.k_norm = build.empty(d) if config.qk_norm else None
        self.sinks = build.empty(config.num_heads) if config.sinks else None
        self._rope = build.rope(config.rope, d)
        self._interleaved = config.rope is not None and config.rope.interleaved
        self._norm = build.config.norm
        self._ops = build.ops
        self._deterministic = build.deterministic
        self._fused = build.fused_attention
        self._scales = build.scales
        self.specs: tuple[LayerSpec, ...] = (PagedKV(config.num_kv_heads, d, d, build.cache_bytes, config.window),)

    def forward(self, step: MixerInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes the step's keys and values into the cache."""
        (cache,) = step.caches
        assert isinstance(cache, PagedCache)
        config = self.config
        qkv, gate = self.qkv(step.x, norm=step.norm).split(self._sizes, dim=-1)
        rope = Rope(self._rope, self.q_norm, self.k_norm, self._norm.eps, self._norm.offset, self._interleaved)
        written = (qkv, step.batch.positions, step.batch.slots[cache.group], rope, cache.k, cache.v)
        asked = {"deterministic": self._deterministic, "scales": self._scales}
        attend = {"window": config.window, "softcap": config.softcap, "sinks": self.sinks, **asked}
        if step.last_tokens is None:
            o = self._ops.rope_attention(
                *written,
                step.batch.block_tables[cache.group],
                step.batch.attention,
                config.scale,
                **attend,
                fused=self._fused,
            )
        else:
            q = self._ops.rope_kv_write(*written, config.num_heads, **asked)
            num_entries = len(step.batch.context_len)
            o = self._ops.paged_attention(
                select_last(q, step.last_tokens),
                cache.k,
                cache.v,
                step.batch.block_tables[cache.group],
                AttentionBatch(step.last_tokens.starts, step.batch.context_len, num_entries, 1, step.batch.max_context),
                config.scale,
                **attend,
            )
        o = o.flatten(1)
        if self.config.gated:
            o = self._ops.sigmoid_gate(o, select_last(gate, step.last_tokens))
        return self.out.forward_with_next_norm(o, step.residual, step.next_norm)
