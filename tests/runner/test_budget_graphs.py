"""Graphs of steps that hold many prompts: any step up to the budget has a shape, and padding changes no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.core.plan import RowStart, StepPlan
from engine.models.reader import ConfigError
from engine.runner.build import build_runner
from engine.runner.graphs import BOUNDED_PAST, BUDGET_CONTEXT, BUDGET_QUERY, MIXED_TOKENS, Capture, StepGraphs, padding
from engine.runner.inputs import BUDGET_ENTRIES
from engine.runner.runner import DeviceRunner
from engine.types import SamplingParams
from tests.runner.test_drafts import DRAFTED
from tests.runner.test_graphs import TINY, Recorder, own_blocks

BUDGET, ROWS, A_ROW = 4096, 24, 40
LONG = {**TINY, "max_position_embeddings": BUDGET}


CHUNKS = BUDGET_ENTRIES - 2


def of_budget(max_rows: int, budget: int, bounded: bool = False, long_chunks: bool = True) -> StepGraphs:
    return StepGraphs(
        lambda shape: pytest.fail("computed"),
        Recorder(),
        max_rows,
        budget,
        20_480,
        bounded,
        budget_steps=True,
        long_chunks=long_chunks,
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, StepPlan]:
    """Rows and budget of an engine, and a step of it with decode entries and chunks."""
    max_rows, budget = draw(st.integers(2, 600)), draw(st.sampled_from((2200, 4096, 8192, 10_000)))
    decoding = draw(st.integers(0, min(max_rows, 512) - 1))
    chunks = draw(st.integers(1, min(CHUNKS, max_rows - decoding)))
    total = draw(st.integers(2 * chunks, budget - decoding))
    counts = [total // chunks] * (chunks - 1)
    counts.append(total - sum(counts))
    entries, past = decoding + chunks, draw(st.sampled_from((0, 900, 9000)))
    first = [past] * decoding + [0] * chunks
    return max_rows, budget, StepPlan(0, list(range(entries)), first, [1] * decoding + counts, [True] * entries)


@given(steps())
def test_any_step_of_several_requests_up_to_the_budget_has_a_shape(drawn: tuple[int, int, StepPlan]) -> None:
    max_rows, budget, plan = drawn
    shape = of_budget(max_rows, budget).fit(plan)
    if len(plan.rows) == 1:
        return  # a lone prompt has shapes of its own
    assert shape is not None
    longer = len(plan.rows) - plan.count.count(1)
    held = [first + count for first, count in zip(plan.first, plan.count, strict=True)]
    assert plan.num_tokens <= shape.tokens <= budget + padding(max_rows)
    assert shape.num_single >= plan.count.count(1)
    assert shape.max_query >= max(plan.count)
    assert shape.max_context >= max(held)
    dummies, left = shape.entries - len(plan.rows), shape.tokens - plan.num_tokens
    assert left >= dummies - 1, "each but the last has a token"
    behind = shape.entries - shape.num_single - longer
    assert left - dummies <= behind * (shape.max_query - 1), "the last of them hold what fills the shape up"
    near = max(plan.count) <= BUDGET_QUERY and max(held) <= BUDGET_CONTEXT
    short = of_budget(max_rows, budget, long_chunks=False).fit(plan)
    assert (short == shape) if near or shape.tokens <= MIXED_TOKENS[-1] else (short is None)


def test_more_chunks_and_contexts_without_a_bound_are_launched() -> None:
    chunks = CHUNKS + 1
    assert of_budget(64, 8192).fit(StepPlan(0, [*range(chunks)], [0] * chunks, [300] * chunks, [True] * chunks)) is None
    for past, fits in ((BOUNDED_PAST, True), (BOUNDED_PAST + 1, False)):
        plan = StepPlan(0, [0, 1], [past, 0], [1800, 1800], [True] * 2)
        assert (of_budget(64, 8192, bounded=True).fit(plan) is not None) == fits
        assert of_budget(64, 8192).fit(plan) is not None


def test_they_are_made_ahead_behind_the_common_ones() -> None:
    graphs = of_budget(64, 8192)
    made = []
    while (shape := graphs.next_shape) is not None:
        made.append(shape)
        graphs._replays[shape] = lambda: pytest.fail("replayed")
    whole = graphs.fit(StepPlan(0, [0, 1], [0, 0], [4096, 4096], [True] * 2))
    assert whole == graphs.budget(8, 8192 + padding(8), near=False)
    common, near = graphs.mixed(64, 1088), graphs.budget(64, 8192 + padding(64), near=True)
    assert made.index(common) < made.index(near) < made.index(graphs.mixed(64, 128)) < made.index(whole)


def runner_of(folder: Path, capture: Capture | None) -> DeviceRunner:
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=ROWS, token_budget=BUDGET),
        cache=CacheConfig(block_size=16, num_blocks=1 + ROWS * A_ROW),
        runtime=RuntimeConfig(device="cpu", budget_graphs=True),
    )
    runner = build_runner(config)
    if capture is not None:
        runner.use_graphs(capture)
    return runner


@pytest.mark.parametrize(("decoding", "lengths"), [(0, [600] * 6), (9, [400] * 9), (3, [250] * 14)])
def test_padded_steps_draw_the_same_tokens(decoding: int, lengths: list[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LONG))
    generator = torch.Generator().manual_seed(decoding)
    texts = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in [7] * decoding + lengths]
    rows, params = list(range(len(texts))), SamplingParams(temperature=0.0, max_tokens=9)
    starts = [RowStart(row, text, len(text), params) for row, text in enumerate(texts)]
    writes = [own_blocks(row, A_ROW) for row in rows]
    began, late = rows[:decoding], rows[decoding:]
    drawn = []
    recorder = Recorder()
    for runner in (runner_of(tmp_path, recorder), runner_of(tmp_path, None)):
        if began:
            first = StepPlan(1, began, [0] * decoding, [7] * decoding, [True] * decoding, starts[:decoding], writes)
            runner.launch(first).wait()
        counts = [1] * decoding + lengths
        plan = StepPlan(
            2, rows, [7] * decoding + [0] * len(late), counts, [True] * len(rows), starts[decoding:], writes
        )
        both = runner.launch(plan).wait().tokens
        held = [8] * decoding + lengths
        drawn.append((both, runner.launch(StepPlan(3, rows, held, [1] * len(rows), [True] * len(rows))).wait().tokens))
    assert drawn[0] == drawn[1]
    assert max(shape.tokens for shape in recorder.captured) > MIXED_TOKENS[-1]


@pytest.mark.parametrize("near", [True, False])
def test_a_graph_that_is_made_ahead_is_filled_up_by_dummies(near: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LONG))
    recorder = Recorder()
    runner = runner_of(tmp_path, recorder)
    assert runner.graphs is not None
    shape = runner.graphs.budget(8, BUDGET + padding(8), near)
    runner.make_graph(shape)
    assert recorder.captured[-1] == shape
    counts = runner._inputs._parts(shape, 0, 1)[0].diff()
    assert int(counts.sum()) == shape.tokens
    assert int(counts.max()) <= min(shape.max_query, shape.max_context)


def test_models_and_settings_that_have_no_such_graphs_say_so(tmp_path: Path) -> None:
    def refused(config: dict[str, object], sentence: str, **settings: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        runtime = RuntimeConfig(device="cpu", budget_graphs=True)
        given = {"cache": CacheConfig(num_blocks=64), "runtime": runtime, **settings}
        with pytest.raises(ConfigError, match=sentence):
            build_runner(EngineConfig(model=str(tmp_path), load_format="dummy", **given))  # type: ignore[arg-type]

    refused({**LONG, "max_position_embeddings": 1024}, "a max_model_len of as many, which is 1024")
    refused(LONG, "which is 32768", scheduler=SchedulerConfig(token_budget=32_768))


@pytest.mark.parametrize(
    ("family", "settings", "made"),
    [
        ("experts", {}, True),
        ("latents", {}, True),
        ("dense", {}, False),
        ("states", {}, False),
        ("entries", {}, False),
        ("experts", {"runtime": {"graphs": False}}, False),
        ("experts", {"runtime": {"budget_graphs": False}}, False),
        ("experts", {"max_model_len": 1024}, False),
        ("experts", {"scheduler": {"token_budget": 32_768}}, False),
        ("experts", {"scheduler": {"token_budget": 2048}}, False),
    ],
    ids=str,
)
def test_models_with_experts_have_them_where_all_layers_cache_all_tokens(
    family: str, settings: dict[str, Any], made: bool, tmp_path: Path
) -> None:
    model = {**DRAFTED[family], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(model))
    given = {"model": str(tmp_path), "load_format": "dummy", "cache": {"num_blocks": 64, "block_size": 128}, **settings}
    given["scheduler"] = {"max_rows": 4, "token_budget": 4096, **settings.get("scheduler", {})}
    given["runtime"] = {"device": "cpu", **settings.get("runtime", {})}
    runner = build_runner(msgspec.convert(given, EngineConfig))
    runner.use_graphs(Recorder())
    assert runner.graphs is not None
    assert bool(runner.graphs._budgets) == made
