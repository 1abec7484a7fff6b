"""Costs of steps are measured on plans that a runner takes: each row's blocks, new prompts, nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engine.core.plan import StepPlan
from perf.simulate import step_costs
from tests.core.scripted_runner import ScriptedRunner, pool
from tests.runner import tiny


def test_plans_read_only_what_was_computed() -> None:
    """The scripted runner fails on a read of a slot that nobody wrote."""
    steps = step_costs.Steps(ScriptedRunner(pool(400)), 8, 64, 20, 16)
    runner = steps._runner
    assert isinstance(runner, ScriptedRunner)
    for rows, chunks in ((5, [16, 9]), (0, [16]), (3, [])):
        steps.fill(5)
        for i in range(4):
            runner.launch(steps.plan(rows, 20 + i, chunks)).wait()
    last: StepPlan = runner.plans[-1]
    assert (last.rows, last.first, last.count) == ([0, 1, 2], [23, 23, 23], [1, 1, 1])


def test_costs_of_a_model_are_published_with_where_they_come_from(tmp_path: Path) -> None:
    runner = tiny.make(tmp_path, max_rows=4)
    costs = step_costs.measure(runner, 4, 256, 40, 32, rows=[0, 2, 4], prompts=[0, 48, 512])
    # four rows leave none for a prompt, and what is more than the budget is cut to it
    assert [(cost.rows, cost.prompt, cost.chunks) for cost in costs] == [(0, 48, 2), (2, 0, 0), (2, 48, 2), (4, 0, 0)]
    assert all(cost.step_ms > 0 and cost.launch_ms > 0 for cost in costs)
    file = tmp_path / "costs.jsonl"
    step_costs.publish(costs, str(tmp_path / "some-model"), ["load_format=dummy"], file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["model"] == "some-model"
    assert {"commit", "rows", "context", "prompt", "chunks", "step_ms", "launch_ms", "settings"} <= set(lines[0])
