"""A minute of faults that loses nothing; `make chaos` is the same for longer, with every kind of fault."""

from __future__ import annotations

import pytest

from tests.chaos import storm
from tests.chaos.__main__ import drawn
from tests.chaos.clients import undisturbed
from tests.chaos.fleet import Fleet
from tests.chaos.schedule import draw

KINDS = (
    "kill-engine",
    "stop-engine",
    "kill-worker",
    "stop-worker",
    "stop-server",
    "slow-readers",
    "half-open",
    "load-unload",
)


@pytest.mark.timeout(400)
def test_a_minute_of_faults_loses_nothing() -> None:
    with Fleet() as fleet:
        report = storm.run(fleet, draw(39, 60.0, drawn(KINDS)), undisturbed(fleet))
    assert not report.violations, str(report)
    assert report.ends["ok"] > 20, str(report)
