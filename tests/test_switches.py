"""Every optimisation has an off switch, and tokens are the same with it on and off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.types import RequestInput, SamplingParams
from tests.runner.tiny import VOCAB, write


def switches() -> Iterator[tuple[str, str, object]]:
    """(part, field, the value it does not have by default): every bool of the runtime and cache settings, so that a new
    switch is walked as soon as it is there, and what cuts the work up."""
    for part, config in (("runtime", RuntimeConfig()), ("cache", CacheConfig())):
        for field in msgspec.structs.fields(config):
            value = getattr(config, field.name)
            if isinstance(value, bool):
                yield part, field.name, not value
    yield "runtime", "budget_graphs", True
    yield "scheduler", "chunk_size", 5
    yield "scheduler", "mixed_budget", 3
    yield "scheduler", "preference", "latency"
    yield "scheduler", "preference", "throughput"
    yield "scheduler", "max_rows", 3
    yield "cache", "block_size", 32
    yield "cache", "num_blocks", 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


def tokens(checkpoint: Path, part: str = "runtime", **change: object) -> list[list[int]]:
    """What requests give in two rounds; the second may find the first in the prefix cache."""
    config = EngineConfig(
        model=str(checkpoint),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=8, token_budget=64),
        cache=CacheConfig(num_blocks=128),
        runtime=RuntimeConfig(device="cpu"),
    )
    config = msgspec.structs.replace(config, **{part: msgspec.structs.replace(getattr(config, part), **change)})
    engine = Engine.from_config(config).start()
    try:
        rounds = [engine.generate(requests(n)) for n in range(2)]
        engine.check_integrity()
    finally:
        engine.close()
    return [generation.token_ids for results in rounds for generation in results]


def requests(round: int) -> list[RequestInput]:
    """Greedy and sampled requests; half of them share a prefix."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(8, VOCAB, (40,), generator=generator).tolist()
    made = []
    for i in range(10):
        own = torch.randint(8, VOCAB, (1 + 7 * i,), generator=generator).tolist()
        params = SamplingParams(temperature=0.8 * (i % 3 == 2), seed=i, max_tokens=24, ignore_eos=True)
        made.append(RequestInput(request_id=f"{round}-{i}", prompt_ids=shared * (i % 2) + own, params=params))
    return made


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return tokens(checkpoint)


def test_both_rounds_are_the_same(expected: list[list[int]]) -> None:
    assert expected[:10] == expected[10:]
    assert all(len(set(generated)) > 4 for generated in expected)


@pytest.mark.parametrize(("part", "field", "value"), list(switches()))
def test_a_switch_changes_no_token(
    checkpoint: Path, expected: list[list[int]], part: str, field: str, value: object
) -> None:
    assert tokens(checkpoint, part, **{field: value}) == expected
