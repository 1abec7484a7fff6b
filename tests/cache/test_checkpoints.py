"""Slots of recurrent state: rows first, checkpoints as long as there is room."""

from __future__ import annotations

import pytest

from engine.cache.checkpoints import StateSlots
from engine.cache.radix import Node


def node() -> Node:
    return Node(None, b"", b"", [])


def test_reserve_publish_and_give_way_to_rows_oldest_first() -> None:
    slots = StateSlots(4)
    old, new = node(), node()
    for place in (old, new):
        slots.publish(place, slots.reserve())
    slots.pin(old.checkpoint)
    slots.unpin()
    rows = [slots.take(), slots.take()]
    assert (bool(old.checkpoint), bool(new.checkpoint)) == (True, False), "the one used last stays"
    slots.check_integrity(rows, [old, new])
    assert slots.take() != 0
    assert slots.take() == 0


def test_a_pinned_checkpoint_keeps_its_slot() -> None:
    slots = StateSlots(2)
    place = node()
    slots.publish(place, slots.reserve())
    slots.pin(place.checkpoint)
    assert slots.take() == 0
    slots.unpin()
    assert slots.take() == 1
    assert place.checkpoint == 0


def test_a_second_checkpoint_of_a_node_is_released() -> None:
    slots = StateSlots(3)
    place = node()
    slots.publish(place, slots.reserve())
    slots.publish(place, slots.reserve())
    assert (slots.num_free, slots.num_checkpoints) == (1, 1)
    slots.retract(place)
    slots.check_integrity([], [place])


def test_slot_zero_and_foreign_slots_are_refused() -> None:
    slots = StateSlots(3)
    held = slots.take()
    assert held != 0
    for wrong in (0, 3, 3 - held):
        with pytest.raises(ValueError, match="not held"):
            slots.release(wrong)
    slots.release(held)
    slots.check_integrity([], [])
