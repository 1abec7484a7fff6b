"""Gaps of a trace in which the device had nothing to do."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from perf.profile import idle


def _event(start: float, spent: float) -> dict[str, float]:
    return {"ts": start, "dur": spent}


def test_time_in_which_no_kernel_runs_is_idle() -> None:
    assert idle([_event(0, 10), _event(12, 3), _event(15, 1)]) == [2]
    assert idle([_event(0, 10), _event(2, 20), _event(11, 1), _event(25, 1)]) == [3]  # kernels that overlap
    assert idle([_event(20, 1), _event(0, 10)]) == [10]  # in any order
    assert idle([]) == []
