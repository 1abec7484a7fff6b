"""The memory behind a PoolSpec: one pool a group, page-first, and each layer's views of it.

A pool of paged keys and values is [num_blocks, layers, block_size * bytes of a token …]: all layers of a block stand
together, so that one block is one copy. A layer sees its own part with the strides of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.cache.spec import CompressedKV, Group, LatentKV, PagedKV, PoolSpec, Recurrent
from engine.cache.writes import StateCopy

# Numbers of one byte are 8-bit floats, wider ones of the model's dtype.
_FP8 = torch.float8_e4m3fn
_BY_BYTES = {4: torch.float32, 2: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PagedCache:
    """k [N, G, block_size, D] and v [N, G, block_size, Dv] of one layer; `group` picks the batch's block table."""

    group: int
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentCache:
    """entries [N, entries a block, dim]: one vector a token (LatentKV, latent then rope) or a run (CompressedKV).

    keys [N, block_size, rope]: the rotated part of tokens, where entries are latents of 8-bit floats alone.
    """

    group: int
    entries: torch.Tensor
    keys: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateCache:
    """Recurrent state of one layer: one tensor [slots, *shape] for each of the spec's shapes."""

    group: int
    states: tuple[torch.Tensor, ...]


LayerCache = PagedCache | LatentCache | StateCache


class CacheTensors:
    """Allocates the pools of `spec` on `device`, zeroed. layers[i] holds layer i's caches in the order of its specs.

    Raises ValueError where the device's memory does not hold them.
    """

    def __init__(self, spec: PoolSpec, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.pools: list[tuple[torch.Tensor, ...]] = []
        views: list[list[LayerCache]] = [[] for _ in range(num_layers)]
        for index, group in enumerate(spec.groups):
            try:
                pools, caches = _allocate(index, group, spec, dtype, device)
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError) and device.type != "cpu":
                    raise
                blocks = spec.num_blocks[index]
                raise ValueError(
                    f"the memory of {device} does not hold a cache of {blocks} blocks of {spec.block_share} tokens in "
                    f"{len(group.layers)} layers: lower cache.num_blocks or scheduler.max_rows, or leave them out"
                ) from error
            self.pools.append(pools)
            for layer, cache in zip(group.layers, caches, strict=True):
                views[layer].append(cache)
        self.layers: tuple[tuple[LayerCache, ...], ...] = tuple(tuple(v) for v in views)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent state between slots, in every recurrent group and in list order."""
        for group, pools in zip(self.spec.groups, self.pools, strict=True):
            if isinstance(group.spec, Recurrent):
                for pool in pools:
                    for copy in copies:
                        pool[copy.target].copy_(pool[copy.source])


def _allocate(
    index: int, group: Group, spec: PoolSpec, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], list[LayerCache]]:
    """The memory of group number `index`, and each of its layers' views of it: zeros, since padding reads block 0."""
    layers, blocks, size = len(group.layers), spec.num_blocks[index], spec.block_share
    kept = group.spec
    if isinstance(kept, PagedKV):
        keys, values = kept.num_kv_heads * size * kept.head_dim, kept.num_kv_heads * size * kept.value_dim
        held = _FP8 if kept.dtype_bytes == 1 else dtype
        pool = torch.zeros(blocks, layers, keys + values, dtype=held, device=device)
        k = pool[:, :, :keys].unflatten(2, (kept.num_kv_heads, size, kept.head_dim))
        v = pool[:, :, keys:].unflatten(2, (kept.num_kv_heads, size, kept.value_dim))
        return (pool,), [PagedCache(index, k[:, i], v[:, i]) for i in range(layers)]
    if isinstance(kept, LatentKV) and kept.latent_bytes == 1:
        # All latents of a block stand before its rotated keys, so that both are whole rows.
        latents = size * kept.latent_dim
        pool = torch.zeros(blocks, layers, int(kept.bytes_per_token) * size, dtype=torch.uint8, device=device)
        entries = pool[:, :, :latents].view(_FP8).unflatten(2, (size, kept.latent_dim))
        turned = pool[:, :, latents:].view(dtype).unflatten(2, (size, kept.rope_dim))
        return (pool,), [LatentCache(index, entries[:, i], turned[:, i]) for i in range(layers)]
    if isinstance(kept, LatentKV | CompressedKV):
        if isinstance(kept, LatentKV):
            dim, entries = kept.latent_dim + kept.rope_dim, size
        else:
            dim, entries = kept.dim, size // kept.ratio
        pool = torch.zeros(blocks, layers, entries, dim, dtype=dtype, device=device)
        return (pool,), [LatentCache(index, pool[:, i]) for i in range(layers)]
    pools = tuple(
        torch.zeros(spec.num_state_slots, layers, *shape, dtype=_BY_BYTES[width], device=device)
        for shape, width in zip(kept.shapes, kept.dtype_bytes, strict=True)
    )
    return pools, [StateCache(index, tuple(pool[:, i] for pool in pools)) for i in range(layers)]
