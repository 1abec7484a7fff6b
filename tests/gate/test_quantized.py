"""The gate of quantized checkpoints: the numbers that they stand for, in float32, against transformers' dequantized
model; and that the gate would see a format that is misread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, WeightsConfig
from engine.runner.build import build_runner
from tests.gate.conftest import quick
from tests.gate.families import DEEPSEEK_V2, QWEN3_MOE
from tests.gate.oracle import Golden, golden
from tests.gate.packings import PACKINGS, Packing, packed_golden
from tests.gate.player import EnginePlayer
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import Verdict, judge

PLAYED = 6
LLAMA = SHAPES[2]


def cases() -> Iterator[object]:
    for packing in PACKINGS:
        for shape in (SHAPES[0], LLAMA, QWEN3_MOE, DEEPSEEK_V2):
            marks = pytest.mark.xdist_group(shape.name)
            yield pytest.param(shape, packing, id=f"{packing.name}-{shape.name}", marks=marks)


def truth_of(shape: Shape, packing: Packing, root: Path) -> Golden:
    cache = root / ".cache" / "gate"
    shape = quick(shape)
    return packed_golden(shape, golden(shape, cache), packing, cache)


def play(truth: Golden, shape: Shape, quantize: str | None) -> Verdict:
    config = EngineConfig(
        model=str(truth.folder),
        max_model_len=300,
        scheduler=SchedulerConfig(max_rows=12, token_budget=4096),
        cache=CacheConfig(block_size=shape.block_size, num_blocks=4096 // shape.block_size),
        runtime=RuntimeConfig(dtype="float32"),
        weights=WeightsConfig(activations="16bit", quantize=quantize),  # type: ignore[arg-type]
    )
    sequences = truth.sequences[:PLAYED]
    engine = Engine(build_runner(config), config).start()
    try:
        return judge(sequences, EnginePlayer(engine).play(sequences), "float32")
    finally:
        engine.close()


@pytest.mark.parametrize(("shape", "packing"), list(cases()))
def test_weights_are_the_numbers_that_they_stand_for(
    shape: Shape, packing: Packing, pytestconfig: pytest.Config
) -> None:
    truth = truth_of(shape, packing, Path(pytestconfig.rootpath))
    verdict = play(truth, shape, packing.quantize)
    assert verdict.passes("float32"), verdict
