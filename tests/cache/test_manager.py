"""The KV manager: hits by group kind, all or nothing admission, and an account that closes after every call."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from engine.cache.blocks import KVTable
from engine.cache.manager import KVManager
from engine.cache.radix import chain_hash
from engine.cache.spec import CompressedKV, Group, LatentKV, PagedKV, PoolSpec, Recurrent
from tests.core.scripted_runner import pool


def hold(kv: KVManager, tokens: list[int], *, salt: bytes = b"", row: int = 0) -> tuple[KVTable, int]:
    """Admit a request over `tokens`, compute and commit all of them. Its table, and the tokens it found."""
    table = kv.new_table(salt)
    match = kv.match(table, tokens)
    assert kv.admit(table, row, tokens, match, len(tokens), 0) == len(tokens)
    kv.commit(table, tokens, len(tokens))
    kv.check_integrity()
    return table, match.num_tokens


def found(kv: KVManager, tokens: list[int], salt: bytes = b"") -> int:
    return kv.match(kv.new_table(salt), tokens).num_tokens


TOKENS = list(range(100, 120))


def test_at_least_one_token_is_left_to_compute() -> None:
    kv = KVManager(pool(block_size=4))
    hold(kv, TOKENS)
    assert found(kv, TOKENS) == 16
    assert found(kv, [*TOKENS, 1]) == 20
    assert found(kv, TOKENS[:16]) == 12
    assert found(kv, TOKENS[:4]) == 0


def test_two_requests_share_the_blocks_of_their_prefix() -> None:
    kv = KVManager(pool(block_size=4))
    first, _ = hold(kv, TOKENS)
    second, cached = hold(kv, [*TOKENS[:10], 1, 2, 3], row=1)
    assert cached == 8
    assert second.blocks[0][:2] == first.blocks[0][:2]
    assert not set(second.blocks[0][2:]) & set(first.blocks[0])
    kv.release(first)
    kv.release(second)
    kv.check_integrity()
    assert kv.use()[0].used == 0


def test_a_prompt_is_hashed_when_another_asks_what_is_computed() -> None:
    hashed: list[bytes] = []
    kv = KVManager(pool(block_size=4), hash=lambda data: hashed.append(data) or chain_hash(data))  # type: ignore[func-returns-value]
    first = kv.new_table()
    assert kv.admit(first, 0, TOKENS, kv.match(first, TOKENS), len(TOKENS), 0) == len(TOKENS)
    kv.check_integrity()
    assert len(hashed) == 1  # the root
    for tokens, blocks in ((TOKENS, 4), ([*TOKENS[:8], 1, 2, 3, 4, 5], 2), ([9, *TOKENS], 0)):
        other = kv.new_table()
        gain, key = kv.awaited(other, tokens, kv.match(other, tokens))
        assert gain == blocks * 4
        assert kv.is_computing(key) == bool(blocks)
    kv.check_integrity()
    kv.commit(first, TOKENS, len(TOKENS))
    kv.check_integrity()
    kv.release(first)
    kv.check_integrity()


def test_the_switch_turns_the_prefix_cache_off() -> None:
    kv = KVManager(pool(block_size=4), prefix_cache=False)
    table, _ = hold(kv, TOKENS)
    assert found(kv, TOKENS) == 0
    kv.release(table)
    assert kv.use()[0].cached == 0


def test_salts_share_nothing() -> None:
    kv = KVManager(pool(block_size=4))
    hold(kv, TOKENS, salt=b"tenant a")
    assert found(kv, TOKENS, b"tenant b") == 0
    assert found(kv, TOKENS, b"tenant a") == 16


def test_prefixes_are_forgotten_though_requests_hold_them() -> None:
    kv = KVManager(pool(block_size=4))
    held, _ = hold(kv, TOKENS)
    done, _ = hold(kv, TOKENS[::-1], row=1)
    kv.release(done)
    kv.forget_prefixes()
    kv.check_integrity()
    assert found(kv, TOKENS) == found(kv, TOKENS[::-1]) == 0
    assert kv.use()[0].cached == 0
    again, hit = hold(kv, TOKENS, row=1)
    assert hit == 0
    kv.release(held)
    kv.release(again)
    kv.check_integrity()
    assert found(kv, TOKENS) == 16


def test_colliding_keys_never_mix_contents() -> None:
    kv = KVManager(pool(block_size=4), hash=lambda data: b"same")
    hold(kv, TOKENS)
    other, cached = hold(kv, [1] * 20, row=1)
    assert cached == 0
    assert (found(kv, [1] * 20), found(kv, TOKENS)) == (16, 16)
    kv.release(other)
    kv.check_integrity()


def test_a_failed_admission_leaves_nothing_behind() -> None:
    kv = KVManager(pool(6, block_size=4))
    first, _ = hold(kv, TOKENS[:8])
    kv.writes.clear()
    table = kv.new_table()
    match = kv.match(table, [*TOKENS[:8], *range(16)])
    assert match.num_tokens == 8
    assert kv.admit(table, 1, [*TOKENS[:8], *range(16)], match, 24, 0) == 8
    kv.check_integrity()
    assert kv.writes == []
    assert (kv.use()[0].used, table.node, table.blocks) == (2, None, [[]])
    kv.release(first)


def test_headroom_is_left_for_those_who_run() -> None:
    kv = KVManager(pool(6, block_size=4))
    table = kv.new_table()
    tokens = TOKENS[:16]
    assert kv.admit(table, 0, tokens, kv.match(table, tokens), 16, 2) == 0
    assert kv.admit(table, 0, tokens, kv.match(table, tokens), 16, 1) == 16


def test_one_write_carries_a_whole_prefix() -> None:
    kv = KVManager(pool(block_size=4))
    hold(kv, TOKENS)
    kv.writes.clear()
    hold(kv, [*TOKENS, 1], row=3)
    assert [(w.group, w.row, w.index, len(w.blocks)) for w in kv.writes] == [(0, 3, 0, 5), (0, 3, 5, 1)]


def test_the_oldest_prefix_is_evicted_first_and_only_when_needed() -> None:
    kv = KVManager(pool(7, block_size=4))
    for start in (10, 20):
        table, _ = hold(kv, list(range(start, start + 8)))
        kv.release(table)
    assert kv.use()[0].cached == 4
    hold(kv, list(range(30, 42)))
    assert found(kv, list(range(20, 29))) == 8
    assert found(kv, list(range(10, 19))) == 4


def test_a_windowed_hit_needs_the_blocks_of_the_last_window_only() -> None:
    kv = KVManager(pool(30, 4, window=6, window_blocks=30))
    table, _ = hold(kv, TOKENS)
    kv.release(table)
    tokens = [*TOKENS, 1]
    again = kv.new_table()
    match = kv.match(again, tokens)
    assert match.num_tokens == 20
    kv.admit(again, 0, tokens, match, 21, 0)
    # Position 20 reads back to position 15, in block 3.
    assert [bool(block) for block in again.blocks[1]] == [False, False, False, True, True, True]
    assert all(again.blocks[0])
    kv.check_integrity()


def test_a_windowed_hit_falls_back_to_where_its_window_is_still_there() -> None:
    kv = KVManager(pool(60, 4, window=6, window_blocks=8))
    first, _ = hold(kv, TOKENS[:12])
    second, cached = hold(kv, TOKENS)
    assert cached == 12
    kv.release(second)
    assert found(kv, [*TOKENS, 1]) == 20
    # The first request still holds the two blocks of its window. The third needs the other five.
    third, _ = hold(kv, list(range(200, 220)))
    assert found(kv, [*TOKENS, 1]) == 12
    for table in (first, third):
        kv.release(table)
    kv.check_integrity()


def test_blocks_leave_with_their_window() -> None:
    kv = KVManager(pool(60, 4, window=6, window_blocks=20), prefix_cache=False)
    table, _ = hold(kv, TOKENS)
    assert (kv.use()[0].used, kv.use()[1].used) == (5, 2)
    assert table.blocks[1][:3] == [0, 0, 0]


def test_blocks_that_a_chunk_in_flight_computes_stay_until_they_are_committed() -> None:
    kv = KVManager(pool(60, 4, window=6, window_blocks=20))
    table = kv.new_table()
    assert kv.admit(table, 0, TOKENS, kv.match(table, TOKENS), 20, 0) == 20
    kv.commit(table, TOKENS, 8)  # the first chunk; the second, to 20, was launched before this one had come back
    kv.commit(table, TOKENS, 20)
    kv.release(table)
    assert found(kv, TOKENS) == 16
    assert found(kv, [*TOKENS, 1]) == 20


def test_a_chunk_larger_than_a_windowed_pool_is_cut() -> None:
    kv = KVManager(pool(60, 4, window=6, window_blocks=6))
    table = kv.new_table()
    tokens = list(range(60))
    covered_tokens = kv.admit(table, 0, tokens, kv.match(table, tokens), 60, 0)
    assert covered_tokens == 20
    while covered_tokens < 60:
        kv.commit(table, tokens, covered_tokens)
        further = kv.extend(table, covered_tokens, 60)
        assert further > covered_tokens
        covered_tokens = further
        kv.check_integrity()


def test_recurrent_models_hit_only_at_a_checkpoint() -> None:
    kv = KVManager(pool(30, 4, state_slots=4))
    table = kv.new_table()
    assert kv.admit(table, 0, TOKENS, kv.match(table, TOKENS), 12, 0) == 12
    kv.save_state(table, 12)
    assert found(kv, [*TOKENS, 1]) == 0
    kv.commit(table, TOKENS, 20)
    assert found(kv, [*TOKENS, 1]) == 12
    assert found(kv, TOKENS[:12]) == 0
    kv.release(table)
    kv.check_integrity()


def test_a_row_starts_from_the_checkpoint_it_hit() -> None:
    kv = KVManager(pool(30, 4, state_slots=4))
    table = kv.new_table()
    kv.admit(table, 0, TOKENS, kv.match(table, TOKENS), 12, 0)
    kv.save_state(table, 12)
    (saved,) = kv.copies
    assert saved.source == table.state_slot
    kv.commit(table, TOKENS, 20)
    kv.copies.clear()
    second, cached = hold(kv, [*TOKENS, 1], row=1)
    assert cached == 12
    assert [(copy.source, copy.target) for copy in kv.copies] == [(saved.target, second.state_slot)]


def test_a_checkpoint_that_was_never_published_is_given_back() -> None:
    kv = KVManager(pool(30, 4, state_slots=4))
    table = kv.new_table()
    kv.admit(table, 0, TOKENS, kv.match(table, TOKENS), 12, 0)
    kv.save_state(table, 12)
    kv.release(table)
    kv.check_integrity()
    assert kv.slot_use().used == kv.slot_use().cached == 0


def test_a_copy_that_a_later_one_reads_is_sent_though_its_checkpoint_gave_way() -> None:
    kv = KVManager(pool(20, 4, state_slots=4))
    first = kv.new_table()
    kv.admit(first, 0, TOKENS, kv.match(first, TOKENS), 12, 0)
    kv.commit(first, TOKENS, 12)
    kv.save_state(first, 12)
    second, tokens = kv.new_table(), [*TOKENS[:12], 1]
    assert kv.admit(second, 1, tokens, kv.match(second, tokens), 13, 0) == 13
    # The third takes the checkpoint's slot, finds too few blocks, and is turned away.
    third, tokens = kv.new_table(), [2] * 60
    assert kv.admit(third, 2, tokens, kv.match(third, tokens), 60, 0) == 0
    assert kv.slot_use().cached == 0
    saved, loaded = kv.copies
    assert saved.source == first.state_slot
    assert saved.target == loaded.source
    assert loaded.target == second.state_slot


def test_without_a_state_slot_a_request_waits() -> None:
    kv = KVManager(pool(30, 4, state_slots=2))
    first, _ = hold(kv, TOKENS)
    table = kv.new_table()
    assert kv.admit(table, 1, [1, 2, 3], kv.match(table, [1, 2, 3]), 3, 0) == 0
    kv.release(first)
    assert kv.admit(table, 1, [1, 2, 3], kv.match(table, [1, 2, 3]), 3, 0) == 3
    kv.check_integrity()


def test_a_model_may_keep_several_kinds_of_state() -> None:
    groups = (
        Group(LatentKV(8, 4, 2), (0,)),
        Group(Recurrent(((4,),), (4,)), (1,)),
        Group(CompressedKV(8, 4, 2), (2,)),
        Group(PagedKV(1, 8, 8, 2, window=8), (3,)),
    )
    kv = KVManager(PoolSpec(groups, (20, 0, 12, 10), 4, 3))
    table, _ = hold(kv, TOKENS)
    assert kv.capacity_tokens == 44
    assert [write.group for write in kv.writes] == [0, 2, 3]
    assert [use.used for use in kv.use()] == [5, 5, 2]
    assert table.state_slot > 0


def test_pools_that_can_never_work_are_refused() -> None:
    with pytest.raises(ValueError, match="a sliding window of 64 tokens needs at least 18 blocks of 4 tokens"):
        KVManager(pool(30, 4, window=64, window_blocks=10))
    KVManager(pool(30, 4, window=64, window_blocks=10), max_length=36)
    with pytest.raises(ValueError, match="the pool has no state slots"):
        KVManager(PoolSpec((Group(Recurrent(((4,),), (4,)), (0,)),), (0,), 4, 0))


BLOCKS, SIZE = st.integers(6, 20), st.just(2)
WINDOW = {"window": st.integers(1, 6), "window_blocks": st.integers(6, 12)}


def test_positions_taken_back_free_the_blocks_behind_them() -> None:
    kv = KVManager(pool(12, 4, window=5, window_blocks=12))
    table, _ = hold(kv, TOKENS[:9])
    free = kv.use()
    kv.writes.clear()
    assert kv.extend(table, 9, 20) == 20
    assert kv.truncate(table, 13) == 2
    assert (len(table.blocks[0]), len(table.blocks[1]), table.covered_tokens) == (4, 4, 16)
    assert [(w.index, len(w.blocks)) for w in kv.writes] == [(3, 1), (3, 1)]
    assert kv.truncate(table, 12) == 2
    assert (kv.writes, kv.use()) == ([], free)
    assert kv.truncate(table, 10) == 0
    kv.check_integrity()


def test_what_was_committed_is_not_taken_back() -> None:
    kv = KVManager(pool(12, 4))
    table, _ = hold(kv, TOKENS[:9])
    with pytest.raises(ValueError, match="positions from 7 on cannot be taken back: 2 full blocks are committed"):
        kv.truncate(table, 7)
    assert kv.truncate(table, 8) == 1
    kv.release(table)
    with pytest.raises(ValueError, match="holds nothing"):
        kv.truncate(table, 0)


def test_a_checkpoint_behind_positions_taken_back_gives_its_slot_up() -> None:
    kv = KVManager(pool(12, 4, state_slots=4))
    table, _ = hold(kv, TOKENS[:5])
    kv.extend(table, 5, 12)
    kv.save_state(table, 8)
    kv.save_state(table, 12)
    assert kv.slot_use().used == 3
    kv.truncate(table, 10)
    kv.check_integrity()
    assert (table.pending[-1][0], kv.slot_use().used) == (2, 2)


class ManagerMachine(RuleBasedStateMachine):
    """Random requests over few contents and small pools: admit, grow, keep state, take back, commit late, release."""

    tables = Bundle("tables")

    @initialize(
        spec=st.one_of(
            st.builds(pool, st.integers(6, 20), st.just(2)),
            st.builds(pool, st.integers(6, 20), st.just(2), window=st.integers(1, 6), window_blocks=st.integers(6, 12)),
            st.builds(
                pool, st.just(2), st.just(2), window=st.just(4), window_blocks=st.integers(6, 9), full=st.just(False)
            ),
            st.builds(
                pool,
                st.integers(6, 20),
                st.just(2),
                window=st.just(5),
                window_blocks=st.just(8),
                state_slots=st.integers(2, 6),
            ),
        ),
        collide=st.sampled_from([16, 16, 1, 0]),
    )
    def build(self, spec: PoolSpec, collide: int) -> None:
        self.kv = KVManager(spec, hash=lambda data: chain_hash(data)[:collide])
        self.lengths: dict[int, tuple[list[int], int]] = {}
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}

    @rule(target=tables, tokens=st.lists(st.integers(1, 2), min_size=1, max_size=9), headroom=st.integers(0, 2))
    def admit(self, tokens: list[int], headroom: int) -> KVTable:
        table = self.kv.new_table()
        match = self.kv.match(table, tokens)
        assert match.num_tokens < len(tokens)
        covered_tokens = self.kv.admit(table, 0, tokens, match, len(tokens), headroom)
        assert match.num_tokens <= covered_tokens <= len(tokens)
        if covered_tokens > match.num_tokens:
            for i, node in enumerate(match.path):
                assert node.tokens == b"".join(t.to_bytes(4, "little") for t in tokens[2 * i : 2 * i + 2])
            self.lengths[id(table)] = (list(tokens), covered_tokens)
        return table

    @rule(table=tables, count=st.integers(1, 5), token=st.integers(1, 2))
    def grow(self, table: KVTable, count: int, token: int) -> None:
        if id(table) in self.lengths:
            tokens, computed = self.lengths[id(table)]
            tokens = tokens + [token] * max(0, computed + count - len(tokens))
            self.kv.save_state(table, computed)
            self.lengths[id(table)] = (tokens, self.kv.extend(table, computed, computed + count))

    @rule(table=tables, late=st.integers(0, 4))
    def commit(self, table: KVTable, late: int) -> None:
        if id(table) in self.lengths:
            tokens, computed = self.lengths[id(table)]
            self.kv.commit(table, tokens, max(0, computed - late))

    @rule(table=tables, back=st.integers(0, 6))
    def truncate(self, table: KVTable, back: int) -> None:
        if id(table) in self.lengths and table.node is not None:
            tokens, computed = self.lengths[id(table)]
            length = max(computed - back, table.node.depth * self.kv.block_size)
            if any(self.kv._first_kept(g, length) < table.start[g] for g in self.kv._windowed):
                with pytest.raises(ValueError, match="was let go"):
                    self.kv.truncate(table, length)
                return
            self.kv.truncate(table, length)
            assert length <= table.covered_tokens < length + 2
            self.lengths[id(table)] = (tokens, min(computed, length))

    @rule()
    def forget(self) -> None:
        self.kv.forget_prefixes()

    @rule(table=consumes(tables))
    def release(self, table: KVTable) -> None:
        self.kv.release(table)
        self.lengths.pop(id(table), None)

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            for use in self.kv.use():
                assert use.used + use.cached <= use.total

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for table in list(self.kv._tables.values()):
                self.kv.release(table)
            self.kv.check_integrity()
            assert all(use.used == 0 for use in self.kv.use())
            assert self.kv.slot_use().used == 0


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
