"""Two engines in one process share no state of their kernels: whatever one is set to, or has under way, the other does
not notice. Kernels run on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from engine.config import RuntimeConfig
from engine.runner import build
from engine.runner.runner import DeviceRunner
from kernels.registry import registry
from kernels.workspace import Workspace
from tests.kernels.interpreter import language_bound_once
from tests.runner.tiny import generate, make, start, step

PROMPT = [11 + 7 * i for i in range(6)]
TOKENS = 2
SWITCHED_OFF = RuntimeConfig(
    dependent_launch=False, tuned_gemms=False, direct_copies=False, fused_attention=False, graphs=False
)


@pytest.fixture(scope="module", autouse=True)
def _where_kernels_run() -> Iterator[None]:
    with nullcontext() if torch.cuda.is_available() else language_bound_once():
        yield


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[DeviceRunner, Workspace]]]:
    """One of default settings, and one with what can be switched off switched off; the same weights."""
    made: list[Workspace] = []

    def select(workspace: Workspace, choice: str = "auto", direct_copies: bool = True) -> SimpleNamespace:
        made.append(workspace)
        apart = () if direct_copies else ("move_words",)
        return SimpleNamespace(
            **{op.name: op.reference if op.name in apart else op.bound(workspace) for op in registry()}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "select", select)
        runners = [
            make(tmp_path_factory.mktemp("engine"), 2, runtime, num_hidden_layers=1, num_key_value_heads=1)
            for runtime in (None, SWITCHED_OFF)
        ]
    yield list(zip(runners, made, strict=True))
    for runner in runners:
        runner.close()


@contextmanager
def under_way(workspace: Workspace) -> Iterator[None]:
    """As though launches of its engine had counted some arrivals and not yet all."""
    counters = workspace._counters.values()
    with torch.inference_mode():
        for counter in counters:
            assert not counter.any(), "every launch leaves its counters zero"
            counter.fill_(1)
        yield
        for counter in counters:
            assert bool((counter == 1).all()), "another engine counted in them"
            counter.zero_()


def test_engines_of_different_settings_give_equal_tokens_step_by_step(
    engines: list[tuple[DeviceRunner, Workspace]],
) -> None:
    (one, own), (other, others) = engines
    assert own.products is not None
    assert others.products is None
    want = generate(one, PROMPT, TOKENS)
    assert own._counters, "kernels with counters ran"
    entry, starts = (0, 0, len(PROMPT)), [start(0, PROMPT)]
    for n, token in enumerate(want):
        for runner, beside in ((one, others), (other, own)):
            with under_way(beside):
                assert step(runner, [entry], starts if n == 0 else None).tokens == [token]
        entry = (0, len(PROMPT) + n, 1)


def test_an_engine_that_compiles_ahead_leaves_the_launches_of_another_alone(
    engines: list[tuple[DeviceRunner, Workspace]],
) -> None:
    (one, own), (other, _) = engines
    taken: list[str] = []

    def instead(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        taken.append(kernel.fn.__name__)

    begin = ([(1, 0, 1)], [start(1, PROMPT[:1])])
    with own.launched_by(instead):
        drawn = step(other, *begin).tokens
        assert not taken
        step(one, *begin)
        assert taken
    assert step(one, *begin).tokens == drawn
