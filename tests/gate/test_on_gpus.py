"""The gate with two ranks on GPUs of their own, each a process that follows the first, as an engine runs them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import Engine
from engine.config import EngineConfig, ParallelConfig
from tests.gate.conftest import Record, as_param
from tests.gate.families import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V4, FAMILIES, GPT_OSS, KIMI, QWEN3_MOE
from tests.gate.oracle import FORCED, Golden
from tests.gate.player import EnginePlayer
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import judge

pytestmark = pytest.mark.gpus

EVERY = [shape for shape in (*SHAPES, *FAMILIES) if shape is not GPT_OSS]
# What of ParallelConfig is set, and for which shapes.
WAYS: dict[str, tuple[dict[str, Any], list[Shape]]] = {
    "library": ({"all_reduce": "library"}, EVERY),
    "peer": ({"all_reduce": "peer"}, EVERY),
    "whole experts": ({"expert": "whole"}, [QWEN3_MOE, DEEPSEEK_V2, KIMI, DEEPSEEK_V3, DEEPSEEK_V4, GPT_OSS]),
    "sliced context": ({"context": "sliced"}, [DEEPSEEK_V2, KIMI, DEEPSEEK_V3]),
}
CASES = [
    pytest.param(shape, way, id=f"{shape.name}-{way}", marks=as_param(shape).marks)
    for way, (_, shapes) in WAYS.items()
    for shape in shapes
]


@pytest.mark.parametrize(("shape", "way"), CASES, indirect=["shape"])
def test_two_ranks(config: EngineConfig, truth: Golden, dtype: str, way: str, record: Record) -> None:
    """Twice: prompts whole, then behind prefixes that the first time left."""
    engine = Engine.from_config(replace(config, parallel=ParallelConfig(tensor=2, **WAYS[way][0]))).start()
    try:
        player = EnginePlayer(engine)
        cold = judge(truth.sequences, player.play(truth.sequences), dtype)
        verdict = record(judge(truth.sequences, player.play(truth.sequences), dtype))
        engine.check_integrity()
    finally:
        engine.close()
    assert cold.passes(dtype), cold
    assert max(player.cached) > 0
    assert verdict.positions == len(truth.sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict
