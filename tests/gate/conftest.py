"""Options and fixtures of the gate: which device, where golden data is kept, and the table of verdicts at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from tests.gate.families import FAMILIES, ON_AN_EDGE
from tests.gate.figures import Figure, markdown
from tests.gate.oracle import NUM_SEQUENCES, Golden, golden
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import Verdict

FIGURES: list[Figure] = []

Record = Callable[[Verdict], Verdict]

# Where `make test` has a long prompt: with keys and values, and with latents.
LONG = ("qwen3", "deepseek-v2")
# Those that keep different things: windows of keys, latents, states, compressed entries.
KEEPING = ("gemma3", "deepseek-v2", "qwen3.5", "deepseek-v4")
# What `make test` plays of a shape other than the first, in float32: the engine in chunks and with its prefix cache,
# the device side far out, what is broken on purpose, and through a server those that keep most beside keys and values.
QUICK = (
    ("test_engine.py::test_batched", "chunk-7"),
    *(("test_past_4096", f"[{name}-float32") for name in LONG),
    *(("test_warm_prefix", f"[{name}-") for name in KEEPING),
    ("test_a_broken_part_fails", ""),
    ("test_ranks.py::test_two_ranks[qwen3-moe", ""),
    ("test_ranks.py::test_broken_whole_experts_fail", ""),
    ("test_ranks.py::test_an_expert_on_two_ranks_fails", ""),
    ("test_ranks.py::test_a_broken_context_fails", ""),
    ("test_ranks.py::test_sliced_context", "deepseek-v2-2"),
    ("test_ranks.py::test_whole_experts", "qwen3-moe-3"),
    ("test_ranks.py::test_whole_experts", "gpt-oss-2"),
    ("test_ranks.py::test_inputs_in_an_order_are_shared", ""),
    ("test_ranks.py::test_two_ranks[deepseek-v2", ""),
    ("test_ranks.py::test_a_broken_rank_of_a_state", "qwen3.5"),
    ("test_ranks.py::test_two_ranks[qwen3.5", ""),
    ("test_ranks.py::test_two_ranks[deepseek-v4", ""),
    ("test_over_grpc[float32-qwen3.5", ""),
    ("test_over_grpc[float32-deepseek-v4", ""),
)
# Breaks that another family has as well.
REPEATED = tuple(
    ("test_a_broken_part_fails", broken)
    for broken in (
        "gemma3, window off by one",
        "deepseek-v4, window off by one",
        "gpt-oss, window off by one",
        "deepseek-v4, bias left out of routing",
        "gpt-oss, bias left out of routing",
        "gpt-oss, gate not clipped",
        "gpt-oss, sinks of zero",
    )
)
# What `make test` plays of the first shape in bfloat16 too.
IN_BFLOAT16 = (
    "test_engine.py::test_batched",
    "test_engine.py::test_warm_prefix",
    "test_engine.py::test_a_stale_prefix_fails",
    "test_runner.py::test_batched",
    "test_runner.py::test_a_rope_position_off_by_one_fails",
)
QUICK_SEQUENCES, QUICK_LONG, QUICK_SHORT = 12, 4200, 300

# Broken engines that bfloat16's limits let pass, each seen in float32: branches that add a tenth to a third to the
# residual stream, a window a token short at the few positions past it, parts that are small by nature.
UNSEEN_IN_BFLOAT16 = (
    ("test_a_rope_position_off_by_one_fails", "deepseek-v3"),
    ("test_a_rope_position_off_by_one_fails", "deepseek-v4"),
    ("test_a_rope_position_off_by_one_fails", "qwen3.5"),
    ("test_a_broken_part_fails", "mistral, window off by one"),
    ("test_a_broken_part_fails", "deepseek-v4, window off by one"),
    ("test_a_broken_part_fails", "deepseek-v4, no sinks"),
    ("test_a_broken_part_fails", "deepseek-v4, streams mixed once"),
    ("test_a_broken_part_fails", "gpt-oss, sinks of zero"),
    ("test_a_broken_part_fails", "gpt-oss, biases within experts left out"),
    ("test_a_broken_part_fails", "gpt-oss, bias left out of routing"),
)


# First, so that xdist sees the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the rest of the families' matrix to `make gate`. Golden data is made once, and that may take a while.

    On a GPU each shape and dtype is a group of its own for xdist: golden data was brought there, and compiling is what
    takes time.
    """
    cuda = config.getoption("--device") == "cuda"
    complete = config.getoption("--complete")
    later = []
    for item in items:
        if "tests/gate/" not in item.nodeid:
            continue
        # Golden data that is still to be made has no limit of its own on a GPU: many processes may make some at once.
        item.add_marker(pytest.mark.timeout(150 if cuda else 600, func_only=cuda))
        # One asks transformers, which made the golden data elsewhere; the other has ranks on CPUs.
        if cuda and ("test_oracle.py" in item.nodeid or "test_ranks.py" in item.nodeid):
            later.append(item)
        if cuda:
            item.add_marker(pytest.mark.xdist_group(_dtype_of(item)))
        elif item.get_closest_marker("gpu"):
            later.append(item)
        if _dtype_of(item) == "bfloat16" and any(a in item.nodeid and b in item.nodeid for a, b in UNSEEN_IN_BFLOAT16):
            later.append(item)
        quick = _params(item)["packing"].quick if "packing" in _params(item) else None
        if complete:
            continue
        if quick is not None:
            later += [] if _params(item)["shape"].name in quick else [item]
        elif _shape_of(item) not in (None, SHAPES[0]):
            played = any(a in item.nodeid and b in item.nodeid for a, b in QUICK)
            repeated = any(a in item.nodeid and b in item.nodeid for a, b in REPEATED)
            later += [] if played and not repeated and _dtype_of(item) == "float32" else [item]
        elif "test_over_grpc" in item.nodeid and not cuda:
            later.append(item)  # the dense shape; that the demo's has its numbers through a server, tests/e2e shows
        elif _dtype_of(item) == "bfloat16" and not cuda:
            whole = any(name in item.nodeid for name in IN_BFLOAT16)
            later += [] if whole and "chunk-1]" not in item.nodeid and "no-overlap" not in item.nodeid else [item]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]


def _params(item: pytest.Item) -> dict[str, Any]:
    played = getattr(item, "callspec", None)
    return {} if played is None else played.params


def _dtype_of(item: pytest.Item) -> str:
    return str(_params(item).get("dtype", "float32"))


def _shape_of(item: pytest.Item) -> Shape | None:
    params = _params(item)
    shape: Shape | None = params.get("shape", params.get("broken"))
    return shape


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
    """As `quick` without --complete."""
    return request.param if request.config.getoption("--complete") else quick(request.param)


def quick(shape: Shape) -> Shape:
    """The shape as `make test` plays it: long prompts are shorter, and all but the first shape have a quarter of
    their sequences, in float32."""
    longest = QUICK_LONG if shape.name in LONG else QUICK_SHORT
    if shape == SHAPES[0]:
        return replace_fields(shape, long_prompt=longest)
    return replace_fields(shape, sequences=QUICK_SEQUENCES, long_prompt=longest, dtypes=("float32",))


@pytest.fixture(scope="session")
def truth(shape: Shape, pytestconfig: pytest.Config) -> Golden:
    """Checkpoint and oracle of a shape, less the sequences that stand on an edge."""
    made = golden(shape, Path(pytestconfig.rootpath) / ".cache" / "gate")
    edges = ON_AN_EDGE.get(shape.name, {}) if shape.sequences == NUM_SEQUENCES else ()
    return replace_fields(made, sequences=[s for i, s in enumerate(made.sequences) if i not in edges])


@pytest.fixture(scope="session", params=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def config(shape: Shape, truth: Golden, device: str, dtype: str) -> EngineConfig:
    """An engine that holds every sequence of the gate at once."""
    return EngineConfig(
        model=str(truth.folder),
        max_model_len=shape.long_prompt + 200,
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
    words = "-".join(word for word in words.partition("]")[0].split("-") if word)
    for known in (shape, dtype):
        words = words.replace(known, "")
    broken = test.endswith("_fails")
    case = " ".join((part + ":", *test.removesuffix("_fails").split("_"), words.strip("-")))

    return lambda verdict: keep(request.node, shape, dtype, case.strip(), broken, verdict)


def keep(item: pytest.Item, shape: str, dtype: str, case: str, broken: bool, verdict: Verdict) -> Verdict:
    """Put a verdict into the table. Properties of a report reach the process that prints it, wherever the test ran."""
    item.user_properties.append(("figure", asdict(Figure(shape, dtype, case, broken, verdict))))
    return verdict


class Figures:
    """Gathers what tests measured, and keeps the file of --figures up to date: a stopped run leaves its part."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        found = [value for name, value in report.user_properties if name == "figure"]
        FIGURES.extend(Figure(**{**value, "verdict": Verdict(**value["verdict"])}) for value in found)
        if found and self._path is not None:
            self._path.write_text(markdown(FIGURES))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Figures(config.getoption("--figures")))


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
