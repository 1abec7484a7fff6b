"""The gate through the whole engine: scheduler, prefix tree, overlap loop and runner, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine.api import Engine
from engine.config import EngineConfig
from engine.runner.build import build_runner
from engine.types import RequestInput, SamplingParams
from tests.gate.conftest import Record, changed
from tests.gate.oracle import FORCED, Golden, Sequence
from tests.gate.player import EnginePlayer
from tests.gate.verdict import judge

Start = Callable[..., Engine]


@pytest.fixture
def start(config: EngineConfig) -> Iterator[Start]:
    """Starts engines with changed settings, and closes them."""
    engines = []

    def start(**changes: object) -> Engine:
        settings = changed(config, **changes)
        engines.append(Engine(build_runner(settings), settings).start())
        return engines[-1]

    yield start
    for engine in engines:
        engine.check_integrity()
        engine.close()


def some(truth: Golden, device: str) -> list[Sequence]:
    """All sequences, or on a CPU a dozen: for what takes long, or is seen in any of them."""
    return truth.sequences if device == "cuda" else truth.sequences[:: max(1, len(truth.sequences) // 12)]


@pytest.mark.parametrize(
    ("chunk", "switches"),
    [
        pytest.param(1, {}, id="chunk-1"),
        pytest.param(7, {}, id="chunk-7"),
        pytest.param(0, {}, id="chunk-all"),
        pytest.param(0, {"overlap": False}, id="chunk-all-no-overlap"),
        pytest.param(0, {"graphs": False}, id="chunk-all-no-graphs", marks=pytest.mark.gpu),
        pytest.param(0, {"dependent_launch": False}, id="chunk-all-no-dependent-launch", marks=pytest.mark.gpu),
    ],
)
def test_batched(
    start: Start, truth: Golden, dtype: str, device: str, chunk: int, switches: dict[str, bool], record: Record
) -> None:
    player = EnginePlayer(start(**switches, chunk_size=chunk, prefix_cache=False))
    sequences = some(truth, device) if chunk == 1 else truth.sequences
    verdict = record(judge(sequences, player.play(sequences), dtype))
    assert verdict.positions == len(sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict


def test_alone(start: Start, truth: Golden, dtype: str, device: str, record: Record) -> None:
    player, sequences = EnginePlayer(start(prefix_cache=False)), some(truth, device)
    played = [player.play([sequence])[0] for sequence in sequences]
    verdict = record(judge(sequences, played, dtype))
    assert verdict.positions == len(sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict


def test_warm_prefix(start: Start, config: EngineConfig, truth: Golden, dtype: str, record: Record) -> None:
    # Slots of recurrent state, of which a prompt may keep two, are as many as rows.
    player = EnginePlayer(start(max_rows=3 * config.scheduler.max_rows))
    player.play(truth.sequences)
    verdict = record(judge(truth.sequences, player.play(truth.sequences), dtype))
    # At least one token is always computed, so a prompt of whole blocks misses its last block.
    size = config.cache.block_size
    assert player.cached == [(len(s.prompt) - 1) // size * size for s in truth.sequences]
    assert verdict.positions == len(truth.sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict


def test_preempted(start: Start, config: EngineConfig, truth: Golden, dtype: str, record: Record) -> None:
    engine = start(num_blocks=100 * 16 // config.cache.block_size, chunk_size=7)
    player = EnginePlayer(engine, beside=[long_runner(i) for i in range(12)])
    verdict = record(judge(truth.sequences, player.play(truth.sequences), dtype))
    assert engine.stats().preemptions > 0
    assert verdict.positions == len(truth.sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict


def long_runner(index: int) -> RequestInput:
    """A request that is there first and keeps growing: younger ones must give way to it."""
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=index, ignore_eos=True)
    return RequestInput(request_id=f"long-{index}", prompt_ids=[index + 1], params=params)


def test_a_stale_prefix_fails(start: Start, truth: Golden, dtype: str, device: str, record: Record) -> None:
    """The blocks that the prefix tree names were overwritten: here, by one another's contents."""
    engine, sequences = start(), some(truth, device)
    player = EnginePlayer(engine)
    player.play(sequences)
    for pools in engine.runner._caches.pools:
        for pool in pools:
            pool[1:] = pool[1:].roll(1, dims=0)
    verdict = record(judge(sequences, player.play(sequences), dtype))
    assert max(player.cached) > 0
    assert not verdict.passes(dtype), verdict
