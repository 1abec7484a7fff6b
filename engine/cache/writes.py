"""What the KV manager asks of the device side: entries of block tables, copies of state. Carried by a step plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Entries index, index + 1, … of row `row`'s block table in KV group `group` become `blocks`.

    group counts all groups of the pool; recurrent ones have no table. One write carries a whole prefix at
    admission and one block in steady decode. Entries that left a sliding window keep their old value and may name
    a block that now belongs to another request: they are never read.
    """

    group: int
    row: int
    index: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy recurrent state `source` to `target` (slots of the state pool), in list order, before the step computes."""

    source: int
    target: int
