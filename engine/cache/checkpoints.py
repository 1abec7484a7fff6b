"""Slots of recurrent state: one a running row, the rest for checkpoints on nodes of the prefix tree.

A checkpoint's life: `reserve` a slot → a plan copies a row's state into it → `publish` on the node whose block ends
where the state stands → `pin` while a request is being admitted from it → `release`. Rows come first: when no slot is
free, the least recently used checkpoint without a pin gives its slot up.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.cache.radix import Node


class StateSlots:
    """Slots 1 … num_slots - 1. Slot 0 is reserved for padding. With num_slots 0 or 1 there is no recurrent state."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = max(num_slots, 1)
        self._free = list(range(self.num_slots - 1, 0, -1))
        self._published: OrderedDict[int, Node] = OrderedDict()  # least recently used first
        self._pinned = 0

    @property
    def capacity(self) -> int:
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_checkpoints(self) -> int:
        return len(self._published)

    def take(self) -> int:
        """A slot for a row or for a checkpoint to be (`reserve`), or 0 when every slot is held."""
        if self._free:
            return self._free.pop()
        for slot in self._published:
            if slot != self._pinned:
                self.retract(self._published[slot])
                return self._free.pop()
        return 0

    reserve = take

    def release(self, slot: int) -> None:
        """Give back a slot that `take` handed out and that was not published."""
        if slot in self._free or slot in self._published or not 0 < slot < self.num_slots:
            raise ValueError(f"state slot {slot} is not held by a row or reserved")
        self._free.append(slot)

    def publish(self, node: Node, slot: int) -> None:
        """The reserved slot now holds the state after `node`. If the node has one already, the slot is released."""
        if node.checkpoint:
            self.release(slot)
            self._published.move_to_end(node.checkpoint)
            return
        node.checkpoint = slot
        self._published[slot] = node

    def pin(self, slot: int) -> None:
        """Keep a checkpoint from giving up its slot until `unpin`: a row is about to be started from it."""
        self._published.move_to_end(slot)
        self._pinned = slot

    def unpin(self) -> None:
        self._pinned = 0

    def retract(self, node: Node) -> None:
        """A node loses its checkpoint, if it has one; the slot is free again."""
        slot, node.checkpoint = node.checkpoint, 0
        if slot:
            del self._published[slot]
            self._free.append(slot)

    def check_integrity(self, held: list[int], nodes: list[Node]) -> None:
        """Every slot is free, held by a row (or reserved), or on a node: exactly one of them. Raises AssertionError."""
        found = sorted([*self._free, *held, *self._published])
        assert found == list(range(1, self.num_slots)), f"state slots are lost or held twice: {found}"
        on_nodes = {node.checkpoint: node for node in nodes if node.checkpoint}
        assert on_nodes == dict(self._published), "checkpoints and nodes disagree"
        assert not self._pinned, "a pin outlived the admission it was for"
