"""Who holds each block: the pool of one group, and the table of one request. No torch; the tensors behind the blocks
live elsewhere.

A block is held by the requests whose tables name it and, once it is full and known, by the prefix tree. Its state
follows from the two:

    free      nobody holds it
    idle      only the tree holds it: it can serve a hit, and it can be evicted
    in use    at least one request holds it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.cache.radix import Node, Prefix


class BlockPool:
    """Blocks 1 … num_blocks - 1 of one group. Block 0 is reserved for padding and is never handed out.

    `idle` is in the order in which the blocks became idle, oldest first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks (one is reserved for padding), not {num_blocks}")
        self.num_blocks = num_blocks
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._free = list(range(num_blocks - 1, 0, -1))
        self._users = [0] * num_blocks
        self._in_tree = bytearray(num_blocks)

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self.idle)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free) - len(self.idle)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one user. The caller has made sure that they are there."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked of a pool with {len(self._free)} free ones")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more request holds these blocks, which the tree holds."""
        users, in_tree, idle = self._users, self._in_tree, self.idle
        for block in blocks:
            if not in_tree[block]:
                raise ValueError(f"block {block} is not in the prefix tree and cannot be shared")
            if users[block] == 0:
                del idle[block]
            users[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """A request lets go of these blocks: one becomes idle if the tree holds it, else free once nobody else does."""
        users, in_tree, idle, free = self._users, self._in_tree, self.idle, self._free
        for block in blocks:
            left = users[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is dropped more often than it was taken")
            users[block] = left
            if left == 0:
                if in_tree[block]:
                    idle[block] = None
                else:
                    free.append(block)

    def keep(self, block: int) -> None:
        """The tree takes hold of a block that a request holds."""
        if self._users[block] == 0 or self._in_tree[block]:
            raise ValueError(f"block {block} cannot be put in the prefix tree: it is free or there already")
        self._in_tree[block] = 1

    def evict(self, blocks: Sequence[int]) -> None:
        """The tree lets go of these idle blocks."""
        in_tree, idle = self._in_tree, self.idle
        for block in blocks:
            del idle[block]
            in_tree[block] = 0
        self._free += blocks

    def check_integrity(self, tables: dict[int, int], in_tree: set[int]) -> None:
        """Compare with what is really held: users of each block, and the tree's blocks. Raises AssertionError."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert 0 not in free, "the reserved block 0 is in the free list"
        for block in range(1, self.num_blocks):
            users, kept = tables.get(block, 0), block in in_tree
            assert self._users[block] == users, f"block {block}: {self._users[block]} users counted, {users} found"
            assert bool(self._in_tree[block]) == kept, f"block {block}: the tree and the pool disagree"
            assert (block in free) == (users == 0 and not kept), f"block {block}: wrongly free or lost"
            assert (block in self.idle) == (users == 0 and kept), f"block {block}: wrongly idle"


class KVTable:
    """What one running request holds of the cache. Written by the manager alone.

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
