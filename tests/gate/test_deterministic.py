"""deterministic: tokens and log-probabilities have the same bits however a request is served, and pass the gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import EngineConfig
from engine.models.reader import ConfigError
from engine.runner.build import build_runner
from engine.types import TokenLogprobs
from tests.gate.conftest import Record, as_param, changed
from tests.gate.families import FAMILIES, GEMMA3, MISTRAL, QWEN3_MOE
from tests.gate.oracle import FORCED, Golden
from tests.gate.player import EnginePlayer
from tests.gate.shapes import SHAPES
from tests.gate.test_engine import Start
from tests.gate.test_engine import start as start
from tests.gate.verdict import judge

Heard = list[list[TokenLogprobs]]
INVARIANT = (*SHAPES, MISTRAL, QWEN3_MOE, GEMMA3)
ON_CPU = 12


@pytest.mark.parametrize("shape", [as_param(shape) for shape in INVARIANT], indirect=True)
def test_neither_batch_nor_chunks_nor_prefix_change_a_bit(
    start: Start, truth: Golden, dtype: str, device: str, record: Record
) -> None:
    sequences = truth.sequences if device == "cuda" else truth.sequences[:: len(truth.sequences) // ON_CPU]

    def played(**changes: object) -> EnginePlayer:
        return EnginePlayer(start(deterministic=True, **changes))

    cold = played(prefix_cache=False)
    alone = [cold.play([sequence])[0] for sequence in sequences]
    verdict = record(judge(sequences, alone, dtype))
    assert verdict.positions == len(sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict

    warm = played()
    ways: dict[str, Callable[[], Heard]] = {
        "together": lambda: cold.play(sequences),
        "in chunks of 7": lambda: played(chunk_size=7, prefix_cache=False).play(sequences),
        "without overlap": lambda: played(overlap=False, prefix_cache=False).play(sequences),
        "with a cold prefix": lambda: warm.play(sequences),
        "with a warm prefix": lambda: warm.play(sequences),
    }
    different = [way for way, play in ways.items() if play() != alone]
    assert max(warm.cached) > 0
    assert not different


@pytest.mark.parametrize("shape", [as_param(shape) for shape in FAMILIES if shape not in INVARIANT], indirect=True)
def test_what_it_cannot_keep_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.deterministic"):
        build_runner(changed(config, deterministic=True))
