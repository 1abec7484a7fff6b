"""A minute of faults that loses nothing; `make chaos` is the same for longer, with every kind of fault."""

from __future__ import annotations

from tests.chaos.__main__ import drawn
from tests.chaos.conftest import Keeper
from tests.chaos.schedule import draw

KINDS = (
    "kill-engine",
    "stop-engine",
    "kill-worker",
    "stop-worker",
    "stop-server",
    "stop-serve",
    "stop-frontend",
    "stop-tokenizer",
    "starve-descriptors",
    "starve-memory",
    "hostile",
    "slow-readers",
    "half-open",
    "load-unload",
    "scale",
)
STREAMS = 4  # half of what `make chaos` has


def test_a_minute_of_faults_loses_nothing(keeper: Keeper) -> None:
    report = keeper.storm(draw(44, 60.0, drawn(KINDS)), STREAMS)
    assert not report.violations, str(report)
    assert report.ends["ok"] > 20, str(report)
