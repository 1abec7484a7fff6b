"""deterministic: tokens and log-probabilities have the same bits however a request is served, and pass the gate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.api import Engine
from engine.config import EngineConfig
from engine.runner.build import build_runner
from engine.types import TokenLogprobs
from tests.gate.conftest import Record, as_param, changed
from tests.gate.families import FAMILIES
from tests.gate.oracle import FORCED, Golden
from tests.gate.player import EnginePlayer
from tests.gate.shapes import SHAPES
from tests.gate.verdict import judge

Heard = list[list[TokenLogprobs]]
ON_CPU = 6


@contextmanager
def playing(config: EngineConfig, **changes: object) -> Iterator[EnginePlayer]:
    """An engine in the mode. One at a time: engines of one process share what kernels count in."""
    settings = changed(config, deterministic=True, **changes)
    engine = Engine(build_runner(settings), settings).start()
    try:
        yield EnginePlayer(engine)
        engine.check_integrity()
    finally:
        engine.close()


@pytest.mark.parametrize("shape", [as_param(shape) for shape in (*SHAPES, *FAMILIES)], indirect=True)
def test_neither_batch_nor_chunks_nor_prefix_change_a_bit(
    config: EngineConfig, truth: Golden, dtype: str, device: str, record: Record
) -> None:
    sequences = truth.sequences if device == "cuda" else truth.sequences[:: len(truth.sequences) // ON_CPU]
    heard: dict[str, Heard] = {}
    with playing(config, prefix_cache=False) as player:
        alone = [player.play([sequence])[0] for sequence in sequences]
        heard["together"] = player.play(sequences)
    with playing(config, prefix_cache=False, chunk_size=7) as player:
        heard["in chunks of 7"] = player.play(sequences)
    with playing(config, prefix_cache=False, overlap=False) as player:
        heard["without overlap"] = player.play(sequences)
    with playing(config) as player:
        heard["with a cold prefix"] = player.play(sequences)
        heard["with a warm prefix"] = player.play(sequences)
        assert max(player.cached) > 0
    verdict = record(judge(sequences, alone, dtype))
    assert verdict.positions == len(sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict
    assert [way for way, entries in heard.items() if entries != alone] == []
