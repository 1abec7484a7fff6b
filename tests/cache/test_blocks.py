"""A block is free, idle or in use; it is never lost and never handed out twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.blocks import BlockPool

SIZE = 9


class PoolMachine(RuleBasedStateMachine):
    """Random takes, shares, drops, keeps and evictions against a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.users: Counter[int] = Counter()
        self.kept: set[int] = set()

    def held(self) -> list[int]:
        return sorted(block for block, count in self.users.items() if count)

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert not any(self.users[block] or block in self.kept for block in blocks)
        self.users.update(blocks)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held()))
        self.pool.drop([block])
        self.users[block] -= 1

    @precondition(lambda self: set(self.held()) - self.kept)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.held()) - self.kept)))
        self.pool.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.share([block])
        self.users[block] += 1

    @precondition(lambda self: self.pool.idle)
    @rule()
    def evict(self) -> None:
        block = next(iter(self.pool.idle))
        self.pool.evict([block])
        self.kept.discard(block)

    @invariant()
    def accounts(self) -> None:
        self.pool.check_integrity({block: self.users[block] for block in self.held()}, self.kept)
        assert self.pool.num_used == len(self.held())
        assert self.pool.num_free + self.pool.num_idle + self.pool.num_used == self.pool.capacity == SIZE - 1


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_misuse_is_refused() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="3 blocks asked of a pool with 2 free ones"):
        pool.take(3)
    (block,) = pool.take(1)
    with pytest.raises(ValueError, match="not in the prefix tree"):
        pool.share([block])
    pool.drop([block])
    with pytest.raises(ValueError, match="more often than it was taken"):
        pool.drop([block])
    with pytest.raises(ValueError, match="free or there already"):
        pool.keep(block)
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match=f"block {block}: 1 users counted, 0 found"):
        pool.check_integrity({}, set())
