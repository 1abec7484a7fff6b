"""Sizes of the pools, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cache.spec import LayerSpec, PagedKV, PoolSpec, Recurrent
from engine.cache.tensors import CacheTensors, PagedCache
from engine.config import CacheConfig, SchedulerConfig
from engine.runner.build import largest_step
from engine.runner.memory import size_pools
from engine.types import MAX_LOGPROBS
from tests.runner import tiny

torch = pytest.importorskip("torch")

FULL = PagedKV(num_kv_heads=2, head_dim=8, value_dim=8, dtype_bytes=2)
WINDOW = PagedKV(num_kv_heads=2, head_dim=8, value_dim=8, dtype_bytes=2, window=64)
STATE = Recurrent(shapes=((4, 8), (3,)), dtype_bytes=(4, 2))
BLOCK = 16 * 2 * 16 * 2  # bytes of a block in one layer
FEW = SchedulerConfig(max_rows=4, token_budget=64)


def pool_bytes(spec: PoolSpec) -> int:
    total = 0
    for group, blocks in zip(spec.groups, spec.num_blocks, strict=True):
        if isinstance(group.spec, Recurrent):
            total += group.spec.bytes_per_request * spec.num_state_slots * len(group.layers)
        else:
            total += group.block_bytes(spec.block_size) * blocks
    return total


def size(specs: list[LayerSpec], room: int, max_model_len: int = 1 << 20, **cache: object) -> list[int]:
    pool = size_pools([(spec,) for spec in specs], CacheConfig(**cache), FEW, max_model_len, room)
    assert cache.get("num_blocks") or pool_bytes(pool) <= room
    return [*pool.num_blocks, pool.num_state_slots]


def test_one_group_takes_all_the_room() -> None:
    assert size([FULL] * 3, room=100 * 3 * BLOCK + 7) == [100, 0]


def test_no_more_than_all_rows_could_fill() -> None:
    assert size([FULL], room=1 << 40, max_model_len=160) == [1 + 4 * 10, 0]


def test_the_settings_may_say_it() -> None:
    assert size([FULL, WINDOW], room=0, num_blocks=12) == [12, 12, 0]


def test_windows_take_what_they_can_use_and_the_rest_goes_to_the_others() -> None:
    blocks, windows, _ = size([FULL] + [WINDOW] * 5, room=1000 * BLOCK)
    most = 1 + 4 + 4 * (4 + 2)
    assert windows == most
    assert blocks == 1000 - 5 * most


def test_state_comes_first() -> None:
    request = 4 * 8 * 4 + 3 * 2
    slots = 1 + 2 * 4
    assert size([STATE, FULL, STATE], room=slots * 2 * request + 50 * BLOCK) == [0, 50, slots]
    assert size([STATE, FULL], room=100 * BLOCK, prefix_cache=False)[2] == 1 + 4


def test_no_room_is_said_with_the_numbers() -> None:
    sentence = rf"{2 * BLOCK - 1} bytes are left .* it needs {2 * BLOCK} for 2 blocks of each kind .*cpu_bytes"
    with pytest.raises(ValueError, match=sentence):
        size([FULL], room=2 * BLOCK - 1)
    assert size([FULL], room=2 * BLOCK) == [2, 0]
    with pytest.raises(ValueError, match=f"0 bytes are left .* it needs {4 * BLOCK} for"):
        size([FULL, WINDOW], room=-5)
    assert size([FULL, WINDOW], room=4 * BLOCK) == [2, 2, 0]


def test_room_that_state_takes_is_said_too() -> None:
    states = (1 + 2 * 4) * (4 * 8 * 4 + 3 * 2)
    with pytest.raises(ValueError, match=rf"it needs {2 * BLOCK} for .* and {states} for the recurrent state"):
        size([STATE, FULL], room=states + 2 * BLOCK - 1)
    assert size([STATE, FULL], room=states + 2 * BLOCK) == [0, 2, 9]


def test_a_block_holds_all_layers_of_its_group_together() -> None:
    pool = size_pools([(FULL,), (WINDOW,), (FULL,)], CacheConfig(num_blocks=5), FEW, 64, room=0)
    tensors = CacheTensors(pool, 3, torch.bfloat16, torch.device("cpu"))
    assert sum(part.nbytes for parts in tensors.pools for part in parts) == pool_bytes(pool) == 5 * 3 * BLOCK
    first, last = tensors.layers[0][0], tensors.layers[2][0]
    assert isinstance(first, PagedCache)
    assert isinstance(last, PagedCache)
    assert first.k.shape == first.v.shape == (5, 2, 16, 8)
    first.k[3], last.v[3] = 1, 2
    (whole,) = tensors.pools[0]
    assert whole.shape[:2] == (5, 2)
    assert whole[3].is_contiguous()
    assert whole[3].sum() == first.k[3].numel() * 3
    assert whole.sum() == whole[3].sum()
    assert tensors.layers[1][0].group == 1


def test_the_step_that_memory_is_measured_by_asks_for_all_that_a_request_can(tmp_path: Path) -> None:
    """So that edits, penalties and log-probabilities of every row have their room before the pool is made."""
    runner = tiny.make(tmp_path)
    plan = largest_step(FEW, 256)
    assert (plan.num_tokens, plan.samples) == (FEW.token_budget, [True] * FEW.max_rows)
    result = runner.launch(plan).wait()
    given = [result.logprobs[entry] for entry in range(FEW.max_rows)]
    assert [[len(token.ids) for token in tokens] for tokens in given] == [[MAX_LOGPROBS + 1]] * FEW.max_rows
