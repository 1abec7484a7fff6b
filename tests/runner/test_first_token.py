"""The files of the engine that a first token passes: a plain request goes by nothing that it does not ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from engine.api import Engine
from engine.config import EngineConfig
from engine.core.commit import InFlight
from engine.runner.graphs import Compute, Replay
from engine.runner.inputs import StepShape
from engine.runner.runner import DeviceRunner
from engine.types import RequestInput, TokenEvent
from tests.runner.tiny import GREEDY, make

ROOT = Path(__file__).parents[2]
MAX_FILES = 24
# For drafts, recurrent state, prompts beside decoding rows, shared contexts, constraints.
OF_OTHERS = {
    "core/draft_depth.py",
    "cache/tensors.py",
    "core/prefill_policy.py",
    "parallel/context.py",
    "runner/drafting.py",
    "sampling/logits.py",
}


class FirstEvent:
    came = False

    def deliver(self, events: list[TokenEvent]) -> None:
        self.came = True


def kept(compute: Compute, shape: StepShape) -> Replay:
    """Stands in for CUDA graphs, whose replays run no Python."""
    outcome = compute(shape)
    drawn = outcome.draw()
    return lambda: replace(outcome, draw=lambda: drawn)


def first_token(engine: Engine, name: str, prompt: list[int]) -> None:
    sink, inflight = FirstEvent(), None
    engine.submit(RequestInput(request_id=name, prompt_ids=prompt, params=GREEDY), sink)
    while not sink.came:
        inflight = engine.loop.iterate(inflight)
    engine.abort(name)
    settle(engine, inflight)


def settle(engine: Engine, inflight: InFlight | None) -> None:
    while inflight is not None:
        inflight = engine.loop.iterate(inflight)


def passed(work: Callable[[], None]) -> set[str]:
    """Files of the engine, as paths in its folder, in which a function was called."""
    found: set[str] = set()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    folder = ROOT / "engine"
    return {Path(name).relative_to(folder).as_posix() for name in found if Path(name).is_relative_to(folder)}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> DeviceRunner:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_a_first_token_passes_few_files(runner: DeviceRunner, graphs: bool) -> None:
    if graphs:
        runner.use_graphs(kept)
    engine = Engine(runner, EngineConfig(model="tiny"))
    first_token(engine, "makes the graphs", [*range(8, 60)])
    found = passed(lambda: first_token(engine, "seen", [*range(60, 8, -1)]))
    assert not found & OF_OTHERS
    assert {"api.py", "core/scheduler.py", "runner/runner.py", "core/commit.py"} <= found
    layers = {name for name in found if name.startswith(("layers/", "models/", "quant/", "parallel/"))}
    assert bool(layers) != graphs
    assert len(found - layers) <= MAX_FILES
