"""What one running request holds of the cache."""

from __future__ import annotations

from engine.cache.radix import Node, Prefix


class KVTable:
    """Written by the manager alone.

    blocks     one list a paged group: the block of each run of block_size positions, 0 where it left the window
    start      one int a paged group: entries below it left the window
    covered_tokens  positions that every group's table covers
    node       the deepest tree node the request stands on, locked; None while it holds nothing
    prefix     keys of the request's full blocks
    announced  full blocks of the known tokens that other requests may wait for
    pending    (depth, slot) of state checkpoints that are copied but not yet on a node
    """

    __slots__ = ("announced", "blocks", "covered_tokens", "node", "pending", "prefix", "row", "start", "state_slot")

    def __init__(self, prefix: Prefix, num_groups: int) -> None:
        self.prefix = prefix
        self.row = -1
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.start = [0] * num_groups
        self.covered_tokens = 0
        self.node: Node | None = None
        self.announced = 0
        self.state_slot = 0
        self.pending: list[tuple[int, int]] = []
