"""A request of each family in the block manager: every group keeps what its layers declared, and no more."""

from __future__ import annotations

import pytest

from engine.cache.manager import KVManager
from engine.cache.spec import PoolSpec, Recurrent, group_layers, window_of
from engine.config import CacheConfig, SchedulerConfig
from engine.runner.memory import size_pools
from tests.models.test_published import decoder, parse

LENGTH = 8192
CHUNK = 1024


@pytest.mark.parametrize("num_blocks", [None, 64])
def test_blocks_that_cannot_hold_whole_entries_are_refused(num_blocks: int | None) -> None:
    specs = decoder(parse("deepseek-v4-flash-bf16")).specs
    settings = CacheConfig(block_size=16, num_blocks=num_blocks)
    with pytest.raises(ValueError, match="set block_size to a multiple of 128"):
        size_pools(specs, settings, SchedulerConfig(max_rows=4), max_model_len=256, room=1 << 30)


@pytest.mark.parametrize(
    "name", ["mistral-7b-v0.1", "gemma3-1b", "qwen3.5-4b", "deepseek-v2-lite", "deepseek-v4-flash-bf16"]
)
def test_a_long_request_keeps_whole_groups_windows_and_one_state(name: str) -> None:
    config = parse(name)
    size = max(16, config.block_multiple)
    groups = group_layers(decoder(config).specs)
    states = any(isinstance(group.spec, Recurrent) for group in groups)
    counts = tuple(0 if isinstance(group.spec, Recurrent) else LENGTH // size + 1 for group in groups)
    kv = KVManager(PoolSpec(groups, counts, size, 2 if states else 0), prefix_cache=False)
    tokens = list(range(LENGTH))
    table = kv.new_table()
    covered_tokens = kv.admit(table, 0, tokens, kv.match(table, tokens), CHUNK, 0)
    while covered_tokens < LENGTH:
        kv.commit(table, tokens, covered_tokens)
        kv.check_integrity()
        covered_tokens = kv.extend(table, covered_tokens, covered_tokens + CHUNK)
    kv.commit(table, tokens, covered_tokens)
    kv.check_integrity()

    paged = [group.spec for group in groups if not isinstance(group.spec, Recurrent)]
    for spec, use in zip(paged, kv.use(), strict=True):
        window = window_of(spec)
        # A window of w tokens behind the next one reaches into at most w / size blocks and one more.
        kept = LENGTH // size if window is None else -(-(window - 1) // size)
        assert use.used == kept, spec
    assert kv.slot_use().used == int(states)
    kv.release(table)
    kv.check_integrity()
    assert all(use.used == 0 for use in kv.use())
