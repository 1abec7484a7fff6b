"""What steps with drafts are padded to, and which graphs of them are made ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.core.plan import Draft, StepPlan
from engine.runner.drafting import first_draws
from engine.runner.graphs import StepGraphs
from engine.runner.inputs import StepShape, places
from engine.runner.pending import ComputedStep, DecodedStep
from engine.sampling.sampler import Drawn
from tests.runner.test_graphs import Recorder


def test_a_plan_with_drafts_is_padded_by_dummy_entries() -> None:
    graphs = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 512, 256, max_drafts=5)

    def plan(*counts: int) -> StepPlan:
        drafts = {i: Draft(count - 1, 5, [0]) for i, count in enumerate(counts) if count > 1}
        return StepPlan(0, [*range(len(counts))], [4] * len(counts), [*counts], [True] * len(counts), drafts=drafts)

    assert graphs.fit(plan(5)) == StepShape(2, 5, 0, 5, 256, drafts=4, drafting=1)
    assert graphs.fit(plan(3, 6, 2)) == StepShape(8, 24, 0, 6, 256, drafts=5, drafting=4)
    assert graphs.fit(plan(1, 2, 2, 2)) == StepShape(8 + 8, 8 + 8, 8, 2, 256, drafts=1, drafting=4)
    beside_a_prompt = replace(plan(1, 3, 3), drafts={1: Draft(2, 5, [0])})
    assert graphs.fit(beside_a_prompt) is None
    assert graphs.fit(plan(7)) is None, "deeper than was said"
    few = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 16, 256, max_drafts=5)
    assert few.fit(plan(*[6] * 3)) is None, "more tokens than are staged"
    for shape in graphs._drafting:
        assert shape.entries - shape.num_single == 2 * (shape.tokens - shape.num_single) / (1 + shape.drafts)


def test_beside_prompts_all_rows_stand_in_front_of_the_chunks() -> None:
    graphs = StepGraphs(
        lambda shape: pytest.fail("computed"), Recorder(), 12, 512, 256, max_drafts=5, drafts_beside_prompts=True
    )
    drafts = {1: Draft(2, 1, [1, 1]), 2: Draft(3, 1, [1, 1, 1])}
    plan = StepPlan(1, [*range(5)], [4] * 5, [1, 3, 4, 40, 9], [True] * 5, drafts=drafts)
    shape = graphs.fit(plan)
    assert shape == StepShape.drafted_beside_prompts(8, 4, 128, 256)
    assert shape is not None
    assert (shape.entries, shape.drawing, shape.num_single) == (2 * 8 + 8, 8 * 5, 0)
    at = places(plan, shape)
    assert at == [0, 1, 2, 16, 17]
    assert first_draws(shape, plan, at) == [0, 1, 4, 40, 41]
    deeper = replace(plan, drafts={1: Draft(2, 1, [1, 1]), 2: Draft(5, 1, [1] * 5)}, count=[1, 3, 6, 40, 9])
    assert graphs.fit(deeper) is None
    held = graphs._beside_prompts
    assert len(held) == len(set(held))
    assert all(shape.tokens >= shape.drawing + shape.chunks for shape in held)
    bounded = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 512, 256, True, max_drafts=5)
    assert bounded.fit(plan) is None


def test_graphs_of_drafts_are_made_ahead_of_their_use() -> None:
    outcome = ComputedStep(
        DecodedStep(torch.zeros(1), torch.zeros(1)), torch.zeros(1, 1), lambda: Drawn(torch.zeros(1))
    )
    made = StepGraphs(lambda shape: outcome, Recorder(), 4, 64, 256, max_drafts=3)
    assert {shape for shape in made.first_shapes if shape.drafts} == {
        StepShape.drafted(0, entries, 3, 256) for entries in (1, 2, 4)
    }
    assert not made.drafts_ready(0, 4, 3)
    while (shape := made.next_shape) is not None:
        made.run(shape)
    assert not made.drafts_ready(0, 5, 3), "no such step has a graph"
    for singles in range(4):
        for entries in range(1, 5 - singles):
            for depth in (1, 2, 3):
                counts = [1] * singles + [1 + depth] * entries
                drafts = {singles + i: Draft(depth, 5, [0]) for i in range(entries)}
                rows = singles + entries
                fit = made.fit(StepPlan(0, [*range(rows)], [4] * rows, counts, [True] * rows, drafts=drafts))
                assert fit in made._replays
                assert made.drafts_ready(singles, entries, depth)
