"""Simulated schedules: virtual time adds up, and the engine's real scheduler fills the steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.config import EngineConfig, SchedulerConfig
from engine.core.plan import MixedShapes
from perf.simulate import schedule as simulate
from perf.simulate.schedule import StepTime
from perf.simulate.step_costs import Cost
from perf.workload import parse


def table(decode_ms: float = 4.0, token_ms: float = 0.01) -> StepTime:
    """Steps of `decode_ms` and `token_ms` for each prompt token, launched in no time."""
    return StepTime(
        Cost(rows, 1024, prompt, 0, decode_ms * (rows > 0) + token_ms * prompt, 0.0)
        for rows in (0, 1, 100)
        for prompt in (0, 100, 8192)
        if rows + prompt
    )


def config(**scheduler: object) -> EngineConfig:
    return EngineConfig(model="simulated", scheduler=SchedulerConfig(**scheduler))  # type: ignore[arg-type]


def test_costs_are_interpolated_between_what_was_measured_and_go_on_beyond() -> None:
    costs = [Cost(0, 0, 100, 1, 2.0, 0.5), Cost(8, 0, 0, 0, 3.0, 1.0), Cost(8, 0, 100, 1, 5.0, 1.0)]
    time = StepTime(costs)
    assert time(8, 50, 1) == pytest.approx((0.004, 0.001))
    assert time(4, 100, 1) == pytest.approx((0.0035, 0.00075))
    assert time(16, 0, 0) == pytest.approx((0.006, 0.002))
    assert time(0, 200, 2) == pytest.approx((0.004, 0.001))


def test_a_step_costs_what_the_shape_costs_that_it_is_padded_to() -> None:
    shapes = MixedShapes(rows=(8, 32), tokens=(64, 128), chunks=3)
    # 8 + 2 + 40 tokens fill 64, 8 + 2 + 60 take 128
    costs = [
        Cost(0, 0, 100, 1, 2.0, 0.0),
        Cost(8, 0, 0, 0, 3.0, 0.0),
        Cost(8, 0, 40, 1, 5.0, 0.0),
        Cost(8, 0, 60, 1, 9.0, 0.0),
    ]
    time = StepTime(costs, shapes)
    assert [time(8, prompt, 1)[0] for prompt in (1, 54, 55, 118)] == pytest.approx([0.005, 0.005, 0.009, 0.009])
    assert time(8, 55, 2)[0] == pytest.approx(0.005)
    assert time(8, 60, 4)[0] == pytest.approx(0.00525)  # too many chunks: as it is, between 56 and 120 tokens


def test_rows_that_were_measured_with_fewer_tokens_alone_are_passed_over() -> None:
    costs = [Cost(8, 0, prompt, 1, 3.0 + prompt / 100, 0.0) for prompt in (0, 100, 1000)]
    costs += [Cost(16, 0, prompt, 1, 5.0, 0.0) for prompt in (0, 100)]
    costs += [Cost(0, 0, 1000, 1, 1.0, 0.0)]
    costs += [Cost(32, 0, prompt, 1, 27.0 + prompt / 100, 0.0) for prompt in (0, 100, 1000)]
    time = StepTime(costs)
    assert time(16, 100, 1)[0] == pytest.approx(0.005)
    assert time(16, 1000, 1)[0] == pytest.approx(0.021)


def test_costs_that_are_no_table_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two numbers of rows"):
        StepTime([Cost(0, 0, 100, 1, 2.0, 0.5)])
    with pytest.raises(ValueError, match="and two of prompt tokens"):
        StepTime([Cost(0, 0, 100, 1, 2.0, 0.5), Cost(8, 0, 0, 0, 3.0, 1.0)])


def test_a_lone_request_takes_its_prompt_and_its_steps() -> None:
    figures = simulate.simulate(table(), parse("c=1:n=2:in=1000:out=11"), config())
    assert figures["ttft_ms"]["p50"] == pytest.approx(10.0 + 0.3, abs=1e-3)
    assert figures["itl_ms"]["max"] == pytest.approx(4.0, abs=1e-3)
    assert figures["seconds"] == pytest.approx(2 * (0.0103 + 10 * 0.004), abs=1e-3)
    assert figures["steps"]["prompts"] == {"steps": 2, "rows": 0.0, "prompt": 1000.0, "ms": 10.0}


def test_the_way_to_the_client_and_back_is_counted_once_a_request() -> None:
    near = simulate.simulate(table(), parse("c=1:n=4:in=1000:out=11"), config())
    far = simulate.simulate(table(), parse("c=1:n=4:in=1000:out=11"), config(), away=0.006)
    assert far["seconds"] - near["seconds"] == pytest.approx(4 * 0.006, abs=1e-4)
    assert far["ttft_ms"]["p50"] - near["ttft_ms"]["p50"] == pytest.approx(6.0, abs=1e-2)


def test_prompts_beside_decoding_rows_keep_to_the_budget_that_is_set() -> None:
    free = simulate.simulate(table(), parse("q=50:n=40:in=1000:out=50"), config())
    few = simulate.simulate(table(), parse("q=50:n=40:in=1000:out=50"), config(mixed_budget=100))
    assert few["failed"] == free["failed"] == 0
    assert few["itl_ms"]["max"] == pytest.approx(5.0, abs=1e-2)
    assert free["itl_ms"]["max"] > 10
    assert few["ttft_ms"]["p50"] > free["ttft_ms"]["p50"]


def test_a_command_line_prints_a_line_for_each_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = [
        Cost(rows, 9, prompt, 1, 1.0 + prompt / 100, 0.1) for rows in (0, 8) for prompt in (0, 512) if rows + prompt
    ]
    file = tmp_path / "costs.jsonl"
    file.write_text("".join(json.dumps({**asdict(cost), "model": "m"}) + "\n" for cost in costs))
    arguments = [str(file), "c=2:n=4:in=64:out=4", "--mixed", "32", "--prefill-policy", "16:1:0:48"]
    simulate.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert [("mixed 32" in line, "prefill policy 16:1:0:48" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]
    assert all("tok/s" in line for line in lines)
