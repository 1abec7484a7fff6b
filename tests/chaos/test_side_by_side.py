"""Fleets side by side: what is made of what each of them printed."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from tests.chaos import side_by_side
from tests.chaos.side_by_side import Outcome

TEXT = """SEED=7 MINUTES=30: kill-engine, scale
seed 7 for 60; 2 kill-engine 0 x3
  3 broken, 20 late, 400 ok; a thread waited 1.5 s for a core
seed 8 for 60; 2 scale 0
  1 lost, 90 ok; a thread waited 2.5 s for a core
  tritonserver aborted 2 times
  BROKEN error: grpc-0 by 1, at 2.0 s for 0.1 s, during no fault: stub
"""


def test_storms_are_told_apart_and_their_answers_counted() -> None:
    outcome = Outcome(7, 1, TEXT)
    assert len(outcome.storms) == 2
    assert outcome.broken == [outcome.storms[1]]
    assert (outcome.count(r"(\d+) ok"), outcome.count(r"aborted (\d+) times")) == (490, 2)
    console = Console(width=120, record=True)
    side_by_side.told([outcome, Outcome(107, 1, "no unshare here")], console)
    said = console.export_text()
    assert "BROKEN error: grpc-0 by 1" in said
    assert "2 kill-engine 0 x3" not in said
    assert "no unshare here" in said


def test_more_fleets_than_cores_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(SystemExit):
        side_by_side.main(["--seed", "1", "--fleets", "2", "--cores", str(cores)])
    assert f"2 fleets of {cores} cores do not fit {cores} cores" in capsys.readouterr().err
