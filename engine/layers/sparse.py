"""Attention in a window beside compressed entries of all that is before it (compressed sparse attention, 2026)."""

from __future__ import annotations

import torch
from torch import nn

from engine.cache.spec import CompressedKV, LatentKV, LayerSpec, Recurrent
from engine.cache.tensors import LatentCache, LayerCache, StateCache
from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.mixer import MixerInput
from engine.layers.norm import RmsNorm
from engine.models.config import SparseAttentionConfig
from engine.runner.batch import DeviceBatch, select_last


class Compressor(nn.Module):
    """Makes the entries of one cache: learned places and a norm. `values` [T, C] and `gates` [T, C] come projected."""

    def __init__(self, config: SparseAttentionConfig, dim: int, build: BuildContext) -> None:
        super().__init__()
        self.windows = 2 if config.overlap else 1
        self.channels = self.windows * dim
        self.bias = build.empty(config.ratio, self.channels, dtype=torch.float32)
        self.norm = build.empty(dim)
        self._ratio = config.ratio
        self._drafts = build.drafts
        self._rope = build.rope(config.rope, config.rope.rotary_dim)
        self._eps = build.config.norm.eps
        self._op = build.ops.compress_kv
        self._deterministic = build.deterministic

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The values and gates of the windows that are not closed yet, by position. Tokens that are taken back stand in
        places of their own, so that those before them are still there."""
        return (self.windows * self._ratio + self._drafts, 2, self.channels)

    def forward(
        self, values: torch.Tensor, gates: torch.Tensor, batch: DeviceBatch, cache: LatentCache, state: torch.Tensor
    ) -> None:
        """Writes the entries of the windows that the step closes into `cache`."""
        self._op(
            values,
            gates,
            self.bias,
            self.norm,
            self._rope,
            batch.slots[cache.group],
            cache.entries,
            state,
            batch.state_slots,
            batch.attention,
            self._ratio,
            eps=self._eps,
            deterministic=self._deterministic,
        )


class SparseAttention(nn.Module):
    """residual + out(attend(norm(x))). One product gives the query latent and the key-value vector, another all that
    the compressors and the indexer read of x, which checkpoints store otherwise; a third takes the query latent to the
    heads of queries and indexer."""

    def __init__(self, config: SparseAttentionConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        hidden, heads, d = build.config.hidden, config.num_heads, config.head_dim
        index = config.indexer
        self.compressor = Compressor(config, d, build) if config.ratio else None
        self.index_compressor = Compressor(config, index.head_dim, build) if index is not None else None
        self._beside: list[int] = []
        for compressor in (self.compressor, self.index_compressor):
            self._beside += [0, 0] if compressor is None else [compressor.channels] * 2
        self._beside.append(0 if index is None else index.num_heads)
        self._ups = [heads * d, 0 if index is None else index.num_heads * index.head_dim]
        self.down = Linear(hidden, config.q_rank + d, build)
        self.beside = Linear(hidden, sum(self._beside), build) if config.ratio else None
        self.q_norm = RmsNorm(config.q_rank, build)
        self.q_up = Linear(config.q_rank, sum(self._ups), build)
        self.kv_norm = build.empty(d)
        self.sinks = build.empty(heads, dtype=torch.float32)
        groups = config.out_groups
        self.out_down = build.weight(groups, config.out_rank, heads * d // groups, kinds="dense or fp8")
        self.out = Linear(config.out_groups * config.out_rank, hidden, build, partial=True)
        self._rope = build.rope(config.rope, config.rope.rotary_dim)
        self._eps = build.config.norm.eps
        self._ops = build.ops
        self._deterministic = build.deterministic
        self.specs = self._declare(build.dtype_bytes)

    def _declare(self, dtype_bytes: int) -> tuple[LayerSpec, ...]:
        config = self.config
        specs: list[LayerSpec] = [LatentKV(config.head_dim, 0, dtype_bytes, config.window)]
        states = [c.state_shape for c in (self.compressor, self.index_compressor) if c is not None]
        if config.ratio:
            specs.append(CompressedKV(config.head_dim, config.ratio, dtype_bytes))
        if config.indexer is not None:
            specs.append(CompressedKV(config.indexer.head_dim, config.ratio, dtype_bytes))
        if states:
            specs.append(Recurrent(tuple(states), (dtype_bytes,) * len(states)))
        return tuple(specs)

    def forward(self, step: MixerInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes the step's vectors, entries and states."""
        config = self.config
        window, entries, keys = _latents(step.caches)
        q, kv = self.down(step.x, norm=step.norm).split([config.q_rank, config.head_dim], dim=-1)
        q, index_q = self.q_up(q, norm=self.q_norm).split(self._ups, dim=-1)
        q = self._ops.shared_kv_write(
            q.unflatten(-1, (config.num_heads, config.head_dim)),
            kv,
            step.batch.positions,
            step.batch.slots[window.group],
            self._rope,
            window.entries,
            self.kv_norm,
            eps=self._eps,
        )
        more = {}
        if self.compressor is not None and self.beside is not None and entries is not None:
            states = step.caches[-1]
            assert isinstance(states, StateCache)
            values, gates, index_values, index_gates, index_weights = self.beside(step.x, norm=step.norm).split(
                self._beside, dim=-1
            )
            self.compressor(values, gates, step.batch, entries, states.states[0])
            more = {
                "entries": entries.entries,
                "entry_table": step.batch.block_tables[entries.group],
                "ratio": config.ratio,
            }
            if self.index_compressor is not None and keys is not None:
                self.index_compressor(index_values, index_gates, step.batch, keys, states.states[1])
                more["chosen"] = self._choose(index_q, index_weights, step.batch, keys)
        o = self._ops.sparse_attention(
            q,
            window.entries,
            step.batch.block_tables[window.group],
            step.batch.attention,
            step.batch.positions,
            self._rope,
            self.sinks,
            config.scale,
            config.window,
            **more,
            deterministic=self._deterministic,
        )
        o = select_last(o.flatten(1), step.last_tokens)
        o = self._ops.group_linear(o, self.out_down.value, deterministic=self._deterministic)
        return self.out.forward_with_next_norm(o, step.residual, step.next_norm)

    def _choose(self, q: torch.Tensor, weights: torch.Tensor, batch: DeviceBatch, keys: LatentCache) -> torch.Tensor:
        """The entries that each token reads: [T, top_k] int32."""
        index = self.config.indexer
        assert index is not None
        return self._ops.index_topk(
            self._ops.rotate_tail(q.unflatten(-1, (index.num_heads, index.head_dim)), batch.positions, self._rope),
            weights,
            keys.entries,
            batch.block_tables[keys.group],
            batch.attention,
            self.config.ratio,
            index.top_k,
            (index.num_heads * index.head_dim) ** -0.5,
            deterministic=self._deterministic,
        )


def _latents(caches: tuple[LayerCache, ...]) -> tuple[LatentCache, LatentCache | None, LatentCache | None]:
    """The window, the compressed entries and the indexer's keys, in the order that specs declare them."""
    latents = [cache for cache in caches if isinstance(cache, LatentCache)]
    return latents[0], latents[1] if len(latents) > 1 else None, latents[2] if len(latents) > 2 else None
