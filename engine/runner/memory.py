"""How large the pools are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cache.spec import Group, LayerSpec, PoolSpec, Recurrent, group_layers, window_of
from engine.config import MIN_BLOCKS, CacheConfig, SchedulerConfig


def free_bytes(device: torch.device, cache: CacheConfig, activations: int) -> int:
    """Bytes for the pools: on a GPU `memory_fraction` of what is free, less what a step needs; on CPU `cpu_bytes`."""
    if device.type != "cuda":
        return cache.cpu_bytes
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * cache.memory_fraction) - activations


def size_pools(
    specs: Sequence[tuple[LayerSpec, ...]],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
    room: int,
    rank: int = 0,
    ranks: int = 1,
) -> PoolSpec:
    """Blocks for each group within `room` bytes, or the number the settings ask for. With several `ranks` a block has
    block_size tokens on each.

    Recurrent state comes first: a slot for each row, and as many again for prefix checkpoints. Groups that read a
    window get what max_rows windows need, at most an equal share; the others share what is left, block for block.
    Raises ValueError with the numbers when there are too few blocks to hold a token.
    """
    groups = group_layers(specs)
    for group in groups:
        group.block_bytes(cache.block_size)  # refuses blocks that cannot hold what a layer keeps
    paged = [group for group in groups if not isinstance(group.spec, Recurrent)]
    slots = 0
    if len(paged) < len(groups):
        slots = 1 + scheduler.max_rows * (2 if cache.prefix_cache else 1)
    if cache.num_blocks is not None:
        counts = [0 if isinstance(group.spec, Recurrent) else cache.num_blocks for group in groups]
    else:
        states = sum(
            group.spec.bytes_per_request * len(group.layers) * slots
            for group in groups
            if isinstance(group.spec, Recurrent)
        )
        _check_room(paged, room, states, cache.block_size)
        counts = _distribute(groups, room - states, cache.block_size, scheduler, max_model_len, ranks)
    return PoolSpec(groups, tuple(counts), cache.block_size * ranks, slots, rank, ranks)


def _check_room(paged: Sequence[Group], room: int, states: int, block_size: int) -> None:
    """Raises ValueError where the memory does not hold the fewest blocks that each group needs."""
    blocks = MIN_BLOCKS * sum(group.block_bytes(block_size) for group in paged)
    if paged and room < states + blocks:
        beside = f" and {states} for the recurrent state of all rows" if states else ""
        raise ValueError(
            f"{max(room, 0)} bytes are left for the KV cache, and it needs {blocks} for {MIN_BLOCKS} blocks of each "
            f"kind (one takes what padding writes){beside}: lower scheduler.max_rows, scheduler.token_budget or the "
            "model's size, or raise cache.memory_fraction (on CPU cache.cpu_bytes)"
        )


def _distribute(
    groups: Sequence[Group], room: int, block_size: int, scheduler: SchedulerConfig, max_model_len: int, ranks: int
) -> list[int]:
    sizes = {i: group.block_bytes(block_size) for i, group in enumerate(groups) if group.block_bytes(block_size)}
    # A request never needs more than this many, so neither does the engine.
    most = dict.fromkeys(sizes, 1 + scheduler.max_rows * -(-max_model_len // (block_size * ranks)))
    for i in sizes:
        window = window_of(groups[i].spec)
        if window is not None:
            step = -(-scheduler.token_budget // block_size)
            most[i] = min(most[i], 1 + step + scheduler.max_rows * (-(-window // block_size) + 2))
    counts = [0] * len(groups)
    left = dict(sizes)
    while left:
        each = max(room, 0) // sum(left.values())
        capped = [i for i in left if most[i] <= each]
        for i in capped or list(left):
            counts[i] = min(most[i], each)
            room -= counts[i] * left.pop(i)
    return counts
