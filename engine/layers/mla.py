"""Multi-head latent attention (arXiv:2405.04434) over a latent cache.

The cache holds latents and nothing else. Entries of one query read them as they are: the up-projection of keys is taken
to the queries and that of values to the output ("absorbed"). Entries of many queries have keys and values made of all
that they read ("expanded"), which costs less than queries and outputs as wide as the latents.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.cache.spec import LatentKV, LayerSpec
from engine.cache.tensors import LatentCache
from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.mixer import MixerInput
from engine.layers.norm import RmsNorm
from engine.models.config import LatentAttentionConfig
from engine.runner.batch import DeviceBatch, select_last

# Queries an entry from which expanding pays, and the most bytes that its keys and values may take.
EXPAND_QUERIES = 64
EXPAND_BYTES = 1 << 30


class LatentAttention(nn.Module):
    """residual + out(attend(norm(x))). `down` gives the query (or its latent), the key-value latent and the rotary
    key in one product; kv_up [H, nope + Dv, R] is the up-projection to each head's key and value."""

    def __init__(self, config: LatentAttentionConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        hidden, heads = build.config.hidden, config.num_heads
        wide = heads * (config.nope_dim + config.rope_dim)
        self._first = wide if config.q_rank is None else config.q_rank
        self.down = Linear(hidden, self._first + config.kv_rank + config.rope_dim, build, config.bias)
        self.q_norm = None if config.q_rank is None else RmsNorm(config.q_rank, build, eps=config.latent_eps)
        self.q_up = None if config.q_rank is None else Linear(config.q_rank, wide, build)
        self.kv_norm = build.empty(config.kv_rank)
        self.kv_up = build.weight(heads, config.nope_dim + config.value_dim, config.kv_rank, kinds="dense")
        self.out = Linear(heads * config.value_dim, hidden, build, config.bias, partial=True)
        self._rope = build.rope(config.rope, config.rope_dim)
        self._ops = build.ops
        self._deterministic = build.deterministic
        sizes = (config.nope_dim, config.rope_dim, config.value_dim)
        self._tiles = all(size >= 16 and size & (size - 1) == 0 for size in sizes)
        self._expanded_bytes = heads * (config.nope_dim + config.value_dim) * build.dtype_bytes
        self._scale = build.scales.k  # latents have that of keys
        held = build.cache_bytes if build.cache_scales else None
        self.specs: tuple[LayerSpec, ...] = (
            LatentKV(config.kv_rank, config.rope_dim, build.dtype_bytes, latent_bytes=held),
        )

    def forward(self, step: MixerInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes the step's latents into the cache."""
        (cache,) = step.caches
        assert isinstance(cache, LatentCache)
        config = self.config
        q, kv = self.down(step.x, norm=step.norm).split((self._first, config.kv_rank + config.rope_dim), dim=-1)
        if self.q_up is not None:
            q = self.q_up(q, norm=self.q_norm)
        q = q.unflatten(-1, (config.num_heads, config.nope_dim + config.rope_dim))
        o = self._attend(q, kv, step.batch, cache)
        return self.out.forward_with_next_norm(
            select_last(o.flatten(1), step.last_tokens), step.residual, step.next_norm
        )

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, cache: LatentCache) -> torch.Tensor:
        """q [T, H, D + P], not rotated yet, and kv [T, L + P] → [T, H, V]."""
        expands = self._expands(batch)
        absorbed = self._write(q, kv, batch, cache, batch.slots[cache.group], batch.num_single if expands else len(q))
        attended: torch.Tensor = self._ops.latent_attention(
            q,
            absorbed,
            self.kv_up.value.dense(self.kv_up.dtype),
            cache.entries,
            batch.block_tables[cache.group],
            batch.attention,
            self.config.scale,
            max_total_context=batch.max_total_context if expands else 0,
            deterministic=self._deterministic,
            keys=cache.keys,
            latent_scale=self._scale,
        )
        return attended

    def _write(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: DeviceBatch,
        cache: LatentCache,
        slots: torch.Tensor,
        absorbed: int,
    ) -> torch.Tensor:
        """Rotates q in place and writes the latents at `slots`; the first `absorbed` queries taken to latents."""
        written: torch.Tensor = self._ops.latent_write(
            q,
            kv,
            self.kv_up.value.dense(self.kv_up.dtype),
            batch.positions,
            slots,
            self._rope,
            cache.entries,
            self.kv_norm,
            absorbed,
            eps=self.config.latent_eps,
            interleaved=self.config.rope.interleaved,
            deterministic=self._deterministic,
            keys=cache.keys,
            latent_scale=self._scale,
        )
        return written

    def _expands(self, batch: DeviceBatch) -> bool:
        """Whether to make keys and values for the entries of several queries: it pays from dozens of queries an entry
        on, needs memory for all that they read, and heads that tiles can hold. Deterministic, no entry's queries are
        taken another way than they would be alone."""
        if self._deterministic:
            return False
        num_entries, queries = len(batch.context_len) - batch.num_single, len(batch.token_ids) - batch.num_single
        held = batch.max_total_context * self._expanded_bytes
        return self._tiles and queries >= EXPAND_QUERIES * max(num_entries, 1) and 0 < held <= EXPAND_BYTES
