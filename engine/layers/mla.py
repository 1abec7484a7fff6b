"""Multi-head latent attention (arXiv:2405.04434) over a latent cache.

The up-projection of keys is taken to the queries and that of values to the output ("absorbed"), so that attention
reads the latents as they are and the cache holds nothing else.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.cache.spec import LatentKV, LayerSpec
from engine.cache.tensors import LatentCache, LayerCache
from engine.layers.build import Build
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.models.config import LatentAttentionConfig
from engine.runner.batch import DeviceBatch


class LatentAttention(nn.Module):
    """residual + out(attend(norm(x))). `down` gives the query (or its latent), the key-value latent and the rotary
    key in one product; kv_up [H, nope + Dv, R] is the up-projection to each head's key and value."""

    def __init__(self, config: LatentAttentionConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        hidden, heads = build.config.hidden, config.num_heads
        wide = heads * (config.nope_dim + config.rope_dim)
        self._first = wide if config.q_rank is None else config.q_rank
        self.down = Linear(hidden, self._first + config.kv_rank + config.rope_dim, build, config.bias)
        self.q_norm = None if config.q_rank is None else RmsNorm(config.q_rank, build, eps=config.latent_eps)
        self.q_up = None if config.q_rank is None else Linear(config.q_rank, wide, build)
        self.kv_norm = build.empty(config.kv_rank)
        self.kv_up = build.empty(heads, config.nope_dim + config.value_dim, config.kv_rank)
        self.out = Linear(heads * config.value_dim, hidden, build, config.bias)
        self._rope = build.rope(config.rope, config.rope_dim)
        self._ops = build.ops
        self.specs: tuple[LayerSpec, ...] = (LatentKV(config.kv_rank, config.rope_dim, build.dtype_bytes),)

    def forward(
        self,
        x: torch.Tensor,
        norm: RmsNorm,
        batch: DeviceBatch,
        caches: tuple[LayerCache, ...],
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """x, residual [T, hidden] → [T, hidden]. Writes the step's latents into the cache."""
        (cache,) = caches
        assert isinstance(cache, LatentCache)
        config = self.config
        q, kv = self.down(x, norm=norm).split((self._first, config.kv_rank + config.rope_dim), dim=-1)
        if self.q_up is not None:
            q = self.q_up(q.contiguous(), norm=self.q_norm)
        q = q.unflatten(-1, (config.num_heads, config.nope_dim + config.rope_dim))
        q_rope = self._ops.latent_write(
            q[..., config.nope_dim :],
            kv,
            batch.positions,
            batch.slots[cache.group],
            self._rope,
            cache.entries,
            self.kv_norm,
            eps=config.latent_eps,
            interleaved=config.rope.interleaved,
        )
        k_up, v_up = self.kv_up.split((config.nope_dim, config.value_dim), dim=1)
        q_latent = torch.bmm(q[..., : config.nope_dim].transpose(0, 1), k_up).transpose(0, 1)
        o = self._ops.latent_attention(
            q_latent,
            q_rope,
            cache.entries,
            batch.block_tables[cache.group],
            batch.query_start,
            batch.context_len,
            config.scale,
            batch.num_single,
            batch.max_query,
            batch.max_context,
        )
        o = torch.bmm(o.transpose(0, 1), v_up.transpose(1, 2)).transpose(0, 1)
        return self.out(o.flatten(1), residual=residual)
