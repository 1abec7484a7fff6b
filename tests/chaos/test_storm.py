"""Half a minute of faults, and a minute: nothing is lost. `make chaos` is the same for longer, with every kind."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(("seed", "seconds"), [(44, 30.0), pytest.param(44, 60.0, marks=pytest.mark.slow)])
def test_faults_lose_nothing(keeper: Keeper, seed: int, seconds: float) -> None:
    report = keeper.storm(draw(seed, seconds, drawn(KINDS)), STREAMS)
    assert not report.violations, str(report)
    assert report.ends["ok"] > seconds / 3, str(report)
