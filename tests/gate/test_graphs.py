"""The gate through graphs: steps at exactly a graph's size, and padded up to one.

On CPU a replay computes the padded step again, which shows the padding; on a GPU it is a CUDA graph's.
"""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.runner.build import build_runner
from engine.runner.inputs import MULTI_TOKEN_ENTRIES, StepShape
from engine.runner.runner import DeviceRunner
from tests.gate.conftest import Record
from tests.gate.oracle import FORCED, Golden
from tests.gate.plans import PlanPlayer
from tests.gate.verdict import judge
from tests.runner.test_graphs import Recorder

WHOLE = 1 << 20


class Replayed:
    """A runner whose steps are replayed, and the shapes of those that were."""

    def __init__(self, config: EngineConfig) -> None:
        self.runner: DeviceRunner = build_runner(config)
        if self.runner.graphs is None:
            self.runner.use_graphs(Recorder())
        graphs = self.runner.graphs
        assert graphs is not None
        self.graphs = graphs
        self.shapes: list[StepShape] = []
        run = graphs.run

        def noted(shape: StepShape) -> object:
            outcome = run(shape)
            self.shapes.append(shape)
            return outcome

        graphs.run = noted  # type: ignore[method-assign, assignment]

    def captured(self, shape: StepShape) -> bool:
        return shape in self.graphs._replays


@pytest.fixture(scope="module")
def replayed(config: EngineConfig) -> Replayed:
    return Replayed(config)


SIZES = [(1, 1), (5, 8), (8, 8), (9, 16), (16, 16)]


@pytest.mark.parametrize(("entries", "size"), SIZES, ids=[f"{entries} in {size}" for entries, size in SIZES])
def test_decoding(replayed: Replayed, truth: Golden, dtype: str, entries: int, size: int, record: Record) -> None:
    """FORCED steps of so many entries in a graph of that size; the first of them makes it."""
    sequences = truth.sequences[-entries:]
    replayed.shapes.clear()
    verdict = record(judge(sequences, PlanPlayer(replayed.runner, WHOLE).play(sequences), dtype))
    held = len(sequences[0].prompt)
    shapes = [replayed.graphs.decode(size, held + step) for step in range(1, FORCED + 1)]
    assert all(replayed.captured(shape) for shape in shapes)
    assert replayed.shapes[-FORCED:] == shapes
    assert verdict.positions == entries * (FORCED + 1)
    assert verdict.passes(dtype), verdict


def test_a_prompt_beside_decoding_entries(replayed: Replayed, truth: Golden, dtype: str, record: Record) -> None:
    """Eight entries decode when a prompt joins them, in one graph."""
    late = max(truth.sequences[9:], key=lambda sequence: len(sequence.prompt))
    player = PlanPlayer(replayed.runner, WHOLE)
    tracks = player.deal([*truth.sequences[1:9], late])
    player.bind(tracks)
    for _ in range(3):
        player.advance(tracks[:-1])
    replayed.shapes.clear()
    player.advance(tracks)
    (shape,) = replayed.shapes
    assert shape.num_single == 8
    assert shape.entries > 8
    assert replayed.captured(shape)
    verdict = record(judge([track.sequence for track in tracks], player.finish(tracks), dtype))
    assert verdict.positions == 9 * (FORCED + 1)
    assert verdict.passes(dtype), verdict


@pytest.mark.parametrize("decoding", [0, 8])
def test_prompts_together(replayed: Replayed, truth: Golden, dtype: str, record: Record, decoding: int) -> None:
    """As many short prompts as a graph holds, alone and beside entries that decode."""
    by_length = sorted((s for s in truth.sequences if len(s.prompt) > 1), key=lambda sequence: len(sequence.prompt))
    late = by_length[: MULTI_TOKEN_ENTRIES - 1]
    player = PlanPlayer(replayed.runner, WHOLE)
    tracks = player.deal([*by_length[len(late) : len(late) + decoding], *late])
    player.bind(tracks)
    for _ in range(3 if decoding else 0):
        player.advance(tracks[:decoding])
    replayed.shapes.clear()
    player.advance(tracks)
    (shape,) = replayed.shapes
    assert (shape.num_single, shape.entries) == (8, 8 + MULTI_TOKEN_ENTRIES)
    assert replayed.captured(shape)
    verdict = record(judge([track.sequence for track in tracks], player.finish(tracks), dtype))
    assert verdict.positions == len(tracks) * (FORCED + 1)
    assert verdict.passes(dtype), verdict
