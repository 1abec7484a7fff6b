"""A schedule is a value: drawn from a seed, written and read back, shrunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.__main__ import drawn
from tests.chaos.faults import KINDS
from tests.chaos.schedule import Fault, Schedule, draw, parse, shrink

tenths = st.integers(0, 999).map(lambda n: n / 10)
a_fault = st.builds(
    Fault, tenths, st.sampled_from(sorted(KINDS)), st.integers(0, 1), st.integers(0, 31), tenths, st.integers(1, 4)
)
schedules = st.builds(Schedule, st.integers(0, 1 << 31), st.integers(1, 600).map(float), st.tuples(a_fault, a_fault))


@given(schedules)
def test_a_schedule_is_read_back_from_its_line(schedule: Schedule) -> None:
    assert parse(str(schedule)) == schedule


def test_a_line_that_is_none_is_refused_with_its_part() -> None:
    with pytest.raises(ValueError, match="soon kill-engine"):
        parse("seed 1 for 20; soon kill-engine 0")


@given(st.integers(0, 1 << 31))
def test_a_seed_draws_the_same_schedule_again_and_what_ends_a_replica_comes_last(seed: int) -> None:
    shapes = drawn(None)
    schedule = draw(seed, 60.0, shapes)
    assert schedule == draw(seed, 60.0, shapes)
    assert [fault.at_s for fault in schedule.faults] == sorted(fault.at_s for fault in schedule.faults)
    assert [shapes[fault.kind].ends for fault in schedule.faults] == [False] * (len(schedule.faults) - 1) + [True]


@given(st.integers(0, 10_000), st.data())
def test_a_failing_schedule_shrinks_to_the_faults_that_matter(seed: int, data: st.DataObject) -> None:
    whole = draw(seed, 120.0, drawn(None))
    some = st.sets(st.sampled_from(whole.faults), min_size=1, max_size=2)
    needed = {replace(fault, times=1) for fault in data.draw(some)}

    def fails(schedule: Schedule) -> bool:
        return needed <= {replace(fault, times=1) for fault in schedule.faults}

    assert set(shrink(whole, fails, most_runs=200).faults) == needed


def test_shrinking_stops_after_as_many_runs_as_it_may_have() -> None:
    runs: list[Schedule] = []

    def fails(schedule: Schedule) -> bool:
        runs.append(schedule)
        return len(schedule.faults) >= 5

    assert len(shrink(draw(1, 300.0, drawn(None)), fails, most_runs=7).faults) >= 5
    assert len(runs) == 7
