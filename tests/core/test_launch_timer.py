"""When a launch is held back, and who joins the step because of it."""

from __future__ import annotations

import pytest

from engine.core.launch_timer import EXPECTED_PART, LAUNCH_MARGIN_S, MAX_LAUNCH_MARGIN_S, LaunchTimer
from engine.core.loop import POLL_S
from engine.core.plan import StepPlan
from tests.core.harness import Harness, make_config
from tests.core.scripted_runner import ScriptedRunner, pool

PROMPT = [5, 6, 7, 8, 9]
STEP_S = 0.01


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(rows: int, prompt: int = 0) -> StepPlan:
    count = [1] * rows + [prompt] * (prompt > 0)
    entries = len(count)
    return StepPlan(1, list(range(entries)), [0] * entries, count, [True] * entries)


def run(timer: LaunchTimer, clock: Clock, step: StepPlan, *took: float) -> None:
    for seconds in took:
        timer.launched(step, clock.now)
        clock.now += seconds
        timer.ended(seen=True)


def test_a_launch_begins_shortly_before_the_step_under_way_has_taken_what_its_kind_takes() -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(8), 0.01, 0.01)
    timer.launched(plan(7), clock.now)
    clock.now += 0.003
    assert timer.seconds_left() == pytest.approx(EXPECTED_PART * 0.01 - 0.003 - LAUNCH_MARGIN_S)
    clock.now += 0.02
    assert timer.seconds_left() < 0


@pytest.mark.parametrize("other", [plan(9), plan(8, 128), plan(0, 1000)], ids=["rows", "mixed", "prompt"])
def test_behind_a_step_of_a_kind_that_was_never_seen_it_begins_at_once(other: StepPlan) -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(8), 0.01, 0.01)
    timer.launched(other, clock.now)
    assert timer.seconds_left() <= 0


def test_of_the_last_steps_of_a_kind_the_shortest_counts() -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(8), 0.002, 0.02, 0.013, 0.012, 0.5)
    timer.launched(plan(8), clock.now)
    assert timer.seconds_left() == pytest.approx(EXPECTED_PART * 0.012 - LAUNCH_MARGIN_S)


def test_a_step_that_was_launched_behind_another_begins_when_that_one_ends() -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(1), 0.01, 0.01)
    timer.launched(plan(1), clock.now)
    clock.now += 0.009
    timer.launched(plan(1), clock.now)
    clock.now += 0.001
    timer.ended(seen=True)
    assert timer.seconds_left() == pytest.approx(EXPECTED_PART * 0.01 - LAUNCH_MARGIN_S)


def test_a_launch_that_takes_long_begins_so_much_sooner() -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(0, 8192), 0.1, 0.1)
    began = clock.now
    clock.now += 0.03
    timer.launched(plan(0, 8192), began)
    assert timer.seconds_left() == pytest.approx(EXPECTED_PART * 0.1 - 0.03 - 0.03 - LAUNCH_MARGIN_S)


def test_an_end_that_nobody_saw_counts_as_the_earliest_possible_and_teaches_nothing() -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(1), 0.01, 0.01)
    timer.launched(plan(1), clock.now)
    timer.launched(plan(1), clock.now)
    clock.now += 0.018
    timer.ended(seen=False)  # it began 18 ms ago and took 10 or more
    assert timer.seconds_left() == pytest.approx(2 * EXPECTED_PART * 0.01 - 0.018 - LAUNCH_MARGIN_S)
    clock.now += 0.1
    timer.ended(seen=True)  # when this one began is not known, so not how long it took either
    timer.launched(plan(1), clock.now)
    assert timer.seconds_left() == pytest.approx(EXPECTED_PART * 0.01 - LAUNCH_MARGIN_S)


def test_one_step_that_took_long_holds_nothing_back() -> None:
    """The first of its kind makes a graph, which takes ten times what the step takes."""
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(8), 0.1)
    timer.launched(plan(8), clock.now)
    assert timer.seconds_left() <= 0
    clock.now += 0.01
    timer.ended(seen=True)
    timer.launched(plan(8), clock.now)
    assert timer.seconds_left() == pytest.approx(EXPECTED_PART * 0.01 - LAUNCH_MARGIN_S)


def test_what_was_known_of_steps_behind_which_the_device_ran_dry_is_forgotten() -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    run(timer, clock, plan(8), 0.1, 0.1)
    run(timer, clock, plan(80), 0.1, 0.1)
    timer.launched(plan(8), clock.now)
    assert timer.seconds_left() > 0
    timer.delayed(ran_dry=True)
    assert timer.seconds_left() <= 0
    timer.ended(seen=False)
    timer.launched(plan(80), clock.now)
    assert timer.seconds_left() > 0


def test_a_device_that_ran_dry_is_given_its_next_step_sooner_for_a_while() -> None:
    clock = Clock()
    timer = LaunchTimer(clock)
    timer.launched(plan(8), clock.now)
    timer.delayed(ran_dry=True)
    assert timer.launch_margin_s == 2 * LAUNCH_MARGIN_S
    for _ in range(10):
        timer.delayed(ran_dry=True)
    assert timer.launch_margin_s == MAX_LAUNCH_MARGIN_S
    for _ in range(150):
        timer.delayed(ran_dry=False)
    assert timer.launch_margin_s == LAUNCH_MARGIN_S


def arrival(delay_launch: bool, max_rows: int = 8) -> Harness:
    """`b` comes while a step of `a` runs, 3 ms before it ends."""
    harness = Harness(ScriptedRunner(pool(), step_s=STEP_S), make_config(delay_launch=delay_launch, max_rows=max_rows))
    harness.submit("a", PROMPT, max_tokens=20)
    harness.step(6)
    harness.arriving.append(lambda: harness.submit("b", PROMPT[1:], max_tokens=2))
    harness.step()
    if harness.arriving:
        harness.arriving.pop()()
    return harness


@pytest.mark.parametrize(("delay_launch", "step"), [(True, 7), (False, 8)])
def test_who_arrives_while_a_step_runs_joins_the_next_one(delay_launch: bool, step: int) -> None:
    harness = arrival(delay_launch)
    harness.run()
    joined = next(plan.step for plan in harness.runner.plans if len(plan.rows) == 2)
    assert joined == step
    assert harness.tokens("a") == harness.expected(PROMPT, 20)
    assert harness.tokens("b") == harness.expected(PROMPT[1:], 2)


def test_the_device_never_waits_for_a_launch_that_was_held_back() -> None:
    harness = arrival(True)
    harness.run()
    assert harness.now == pytest.approx(STEP_S * len(harness.runner.plans))


def test_a_step_that_ends_before_its_time_is_noticed_within_a_millisecond() -> None:
    harness = arrival(True)
    runner = harness.runner
    runner.step_s = short = POLL_S / 2
    harness.step()
    ends = runner.free_at
    harness.step()
    assert 0 < runner.free_at - short - ends <= POLL_S
    harness.run()
    assert harness.tokens("a") == harness.expected(PROMPT, 20)


def test_first_steps_that_take_ten_times_as_long_leave_no_trace() -> None:
    """They make graphs. Were they learnt from, every later step would be followed by a pause."""
    harness = Harness(ScriptedRunner(pool(), step_s=10 * STEP_S))
    harness.submit("a", PROMPT, max_tokens=20)
    harness.step(2)
    harness.runner.step_s = usual = 10.3 * POLL_S
    harness.run()
    assert harness.now == pytest.approx(2 * 10 * STEP_S + usual * (len(harness.runner.plans) - 2))


def test_a_launch_is_not_held_back_when_every_row_is_taken() -> None:
    harness = arrival(True, max_rows=1)
    assert harness.now == pytest.approx(6 * STEP_S)
    assert len(harness.runner.plans) == 7
