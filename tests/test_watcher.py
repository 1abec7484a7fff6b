"""Silence that a process heard while it stood still itself does not count."""

from __future__ import annotations

import pytest

from engine.watcher import STILL_S, Watcher


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_counts_while_looks_come_in_time() -> None:
    clock = Clock()
    watcher = Watcher(clock)
    for _ in range(5):
        watcher.look()
        watcher.rest()
        clock.now += STILL_S
    watcher.look()
    assert watcher.counted(3.0) == 3.0
    assert watcher.counted(60.0) == pytest.approx(5 * STILL_S)  # it runs no longer itself


def test_silence_from_before_a_late_look_does_not_count() -> None:
    clock = Clock()
    watcher = Watcher(clock)
    clock.now += STILL_S + 0.1
    watcher.look()
    assert watcher.counted(60.0) == 0.0
    watcher.rest()
    clock.now += 0.5
    watcher.look()
    assert watcher.counted(60.0) == pytest.approx(0.5)


def test_a_long_look_is_no_pause() -> None:
    """Its own work took the time: it ran meanwhile."""
    clock = Clock()
    watcher = Watcher(clock)
    watcher.look()
    clock.now += 5.0
    watcher.rest()
    clock.now += 0.1
    watcher.look()
    assert watcher.counted(60.0) == pytest.approx(5.1)
