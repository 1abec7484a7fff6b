"""Who of several ranks is said to hang, and when nobody is."""

from __future__ import annotations

import pytest

from engine.parallel.local_ranks import Waits, cause
from engine.parallel.rendezvous import UNUSABLE

TIMEOUT_S = 5.0


@pytest.mark.parametrize(
    ("codes", "named"),
    [([None, 0, None], None), ([None, 1, 0], 1), ([1, -9, 1], 1), ([1, 1, UNUSABLE], 2), ([0, -15, -9], 1)],
)
def test_the_rank_is_named_that_the_others_ended_with(codes: list[int | None], named: int | None) -> None:
    assert cause(codes) == named


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def looks(waits: Waits, clock: Clock, seconds: float, done: list[int], sent: int) -> None:
    """As long as so many steps are done of those that were sent."""
    for _ in range(round(seconds / 0.1)):
        waits.rest()
        clock.now += 0.1
        waits.look(done, sent)


def test_one_that_is_long_at_a_step_is_named(clock: Clock) -> None:
    waits = Waits(3, clock)
    looks(waits, clock, 4.0, [7, 8, 8], 8)
    assert waits.fault([0.1, 0.2, 0.0], TIMEOUT_S) is None
    looks(waits, clock, 1.5, [7, 8, 8], 8)
    assert waits.fault([0.1, 0.2, 0.0], TIMEOUT_S) == (0, "has been at the same step for 5 s")


def test_one_that_stands_still_is_named_and_not_those_that_wait_for_it(clock: Clock) -> None:
    waits = Waits(3, clock)
    looks(waits, clock, 5.5, [7, 7, 7], 8)
    assert waits.fault([0.1, 4.9, 0.2], TIMEOUT_S) == (1, "has not run for 5 s")
    assert waits.fault([None, None, 5.2], TIMEOUT_S) == (2, "has not run for 5 s")


def test_a_pause_of_all_processes_is_nobodys_fault(clock: Clock) -> None:
    waits = Waits(2, clock)
    looks(waits, clock, 3.0, [7, 7], 8)
    waits.rest()
    clock.now += 60.0
    waits.look([7, 7], 8)
    assert waits.fault([60.2, 60.1], TIMEOUT_S) is None
    looks(waits, clock, 5.5, [7, 7], 8)
    assert waits.fault([0.1, 65.7], TIMEOUT_S) == (1, "has not run for 5 s")
