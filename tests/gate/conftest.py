"""Options and fixtures of the gate: which device, where golden data is kept, and the table of verdicts at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from tests.gate.families import FAMILIES
from tests.gate.figures import Figure, markdown
from tests.gate.oracle import Golden, golden
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import Verdict

FIGURES: list[Figure] = []

Record = Callable[[Verdict], Verdict]


# What `make test` plays of a family: the engine in chunks and with its prefix cache, the device side far out.
QUICK = (("test_engine.py::test_batched", "chunk-7"), ("test_past_4096", "float32"), ("test_warm_prefix", ""))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the rest of the families' matrix to `make gate`. Golden data is made once, and that may take a while."""
    for item in items:
        if "tests/gate/" in item.nodeid:
            item.add_marker(pytest.mark.timeout(600))
    complete = config.getoption("--complete")
    later = [item for item in items if _of_a_family(item) and not _played(item, complete)]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]


def _played(item: pytest.Item, complete: bool) -> bool:
    """Parts of some families add so little to the residual stream that bfloat16's limits would let them be broken."""
    if complete:
        return not ("_fails" in item.name and "bfloat16" in item.name)
    return any(a in item.nodeid and b in item.nodeid for a, b in QUICK)


def _of_a_family(item: pytest.Item) -> bool:
    played = getattr(item, "callspec", None)
    return played is not None and played.params.get("shape") in FAMILIES


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


def as_param(shape: Shape) -> Any:
    """A shape as a parameter. Tests of one shape stay in one process, which makes its golden data once."""
    return pytest.param(shape, id=shape.name, marks=pytest.mark.xdist_group(shape.name))


@pytest.fixture(scope="session", params=[as_param(shape) for shape in (*SHAPES, *FAMILIES)])
def shape(request: pytest.FixtureRequest) -> Shape:
    """Without --complete the families have a quarter of their sequences."""
    few = request.param in FAMILIES and not request.config.getoption("--complete")
    return replace_fields(request.param, sequences=12) if few else request.param


@pytest.fixture(scope="session")
def truth(shape: Shape, pytestconfig: pytest.Config) -> Golden:
    """Checkpoint and oracle of a shape."""
    return golden(shape, Path(pytestconfig.rootpath) / ".cache" / "gate")


@pytest.fixture(scope="session", params=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def config(shape: Shape, truth: Golden, device: str, dtype: str) -> EngineConfig:
    """An engine that holds every sequence of the gate at once."""
    return EngineConfig(
        model=str(truth.folder),
        max_model_len=4400,
        scheduler=SchedulerConfig(max_rows=48, token_budget=8192),
        cache=CacheConfig(block_size=shape.block_size, num_blocks=1024 * 16 // shape.block_size),
        runtime=RuntimeConfig(device=device, dtype=dtype),
    )


@pytest.fixture(scope="session")
def runner(config: EngineConfig) -> DeviceRunner:
    """A runner for plans that tests write themselves, shared by them."""
    return build_runner(config)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Keeps a verdict for the table at the end, under the test's name."""
    shape, dtype = request.getfixturevalue("shape").name, request.getfixturevalue("dtype")
    part = request.node.module.__name__.rpartition(".test_")[2]
    test, _, words = request.node.name.removeprefix("test_").partition("[")
    broken = test.endswith("_fails")
    for known in (shape, dtype):
        words = words.replace(known, "")
    case = " ".join((part + ":", *test.removesuffix("_fails").split("_"), words.strip("-]")))

    def keep(verdict: Verdict) -> Verdict:
        FIGURES.append(Figure(shape, dtype, case.strip(), broken, verdict))
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
    if not FIGURES:
        return
    terminalreporter.section("correctness gate")
    for figure in FIGURES:
        terminalreporter.write_line(str(figure))
    if path := terminalreporter.config.getoption("--figures"):
        path.write_text(markdown(FIGURES))
