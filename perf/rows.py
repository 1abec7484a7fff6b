"""Rows of steps that a timer makes itself: what they ask for, and blocks and a state slot of their own."""

from __future__ import annotations

from engine.cache.spec import PoolSpec
from engine.cache.writes import BlockWrite
from engine.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


def own_blocks(pool: PoolSpec, row: int, entries: int) -> list[BlockWrite]:
    """The blocks of `row` in each group that has any, shared with other rows where the pool is too small."""
    own = range(row * entries, (row + 1) * entries)
    return [
        BlockWrite(group, row, 0, [1 + entry % (blocks - 1) for entry in own])
        for group, blocks in enumerate(pool.num_blocks)
        if blocks
    ]


def own_slot(pool: PoolSpec, row: int) -> int:
    """The state slot of `row`, 0 where the pool has none."""
    slots = max(pool.num_state_slots - 1, 0)
    return 1 + row % slots if slots else 0
