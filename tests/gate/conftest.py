"""Options and fixtures of the gate: which device, where golden data is kept, and the table of verdicts at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from tests.gate.oracle import Golden, golden
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import Verdict

VERDICTS: list[tuple[str, Verdict]] = []

Record = Callable[[Verdict], Verdict]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


# Tests of one shape stay in one process: its golden data is made once.
@pytest.fixture(
    scope="session",
    params=[pytest.param(shape, id=shape.name, marks=pytest.mark.xdist_group(shape.name)) for shape in SHAPES],
)
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


@pytest.fixture(scope="session")
def truth(shape: Shape, pytestconfig: pytest.Config) -> Golden:
    """Checkpoint and oracle of a shape."""
    return golden(shape, Path(pytestconfig.rootpath) / ".cache" / "gate")


@pytest.fixture(scope="session", params=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def config(truth: Golden, device: str, dtype: str) -> EngineConfig:
    """An engine that holds every sequence of the gate at once."""
    return EngineConfig(
        model=str(truth.folder),
        max_model_len=4400,
        scheduler=SchedulerConfig(max_rows=48, token_budget=8192),
        cache=CacheConfig(num_blocks=1024),
        runtime=RuntimeConfig(device=device, dtype=dtype),
    )


@pytest.fixture(scope="session")
def runner(config: EngineConfig) -> DeviceRunner:
    """A runner for plans that tests write themselves, shared by them."""
    return build_runner(config)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Keeps a verdict for the table at the end, under the test's name."""

    def keep(verdict: Verdict) -> Verdict:
        VERDICTS.append((request.node.nodeid.rpartition("/")[2].replace(".py::test", ""), verdict))
        return verdict

    return keep


def changed(config: EngineConfig, **changes: object) -> EngineConfig:
    """`config` with fields of its scheduler, cache or runtime part replaced, by name."""
    parts = {}
    for part in ("scheduler", "cache", "runtime"):
        mine = {key: changes.pop(key) for key in tuple(changes) if hasattr(getattr(config, part), key)}
        parts[part] = replace(getattr(config, part), **mine)
    assert not changes, changes
    return replace(config, **parts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if VERDICTS:
        terminalreporter.section("correctness gate")
        for name, verdict in VERDICTS:
            terminalreporter.write_line(f"{name:<72} {verdict}")
