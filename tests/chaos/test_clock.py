"""Wall clocks may jump: what has a time of its own goes by the clock that does not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.chaos import storm
from tests.chaos.clients import undisturbed
from tests.chaos.fleet import CLOCK_LIBRARY, Fleet
from tests.chaos.schedule import Fault, Schedule

ROOT = Path(__file__).parents[2]
# Who may ask for the wall clock, which is for dates that are shown, and never for how long something takes.
SHOWN = {
    "clients/openai/request_log.py": "when a request came",
    "clients/openai/responses/answer.py": "created_at, completed_at",
    "clients/openai/shim.py": "created",
    "clients/openai/stats.py": "when gauges were read",
    "engine/serving/frontend/spans.py": "where a span ends",
    "engine/text/chat_template.py": "strftime_now",
}
WALL = {
    ("time", "time"),
    ("time", "time_ns"),
    *((name, word) for name in ("datetime", "date") for word in ("now", "today", "utcnow")),
}


def test_only_dates_that_are_shown_come_from_the_wall_clock() -> None:
    asking = set()
    for folder in ("engine", "clients", "model_repository", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    if (node.value.id, node.attr) in WALL:
                        asking.add(str(file.relative_to(ROOT)))
                elif isinstance(node, ast.ImportFrom) and node.module == "time":
                    assert not {"time", "time_ns"} & {name.name for name in node.names}, file
    assert asking == SHOWN.keys()


@pytest.mark.slow
@pytest.mark.skipif(CLOCK_LIBRARY is None, reason="libfaketime is not installed (make packages)")
def test_a_clock_that_jumps_costs_nothing() -> None:
    jumps = tuple(Fault(2.0 + 3.0 * n, "jump-clock", pick=n, hold_s=2.0) for n in range(5))
    faults = (*jumps, Fault(9.5, "kill-engine", replica=0))
    with Fleet(moves_clock=True) as fleet:
        report = storm.run(fleet, Schedule(22, 22.0, faults), undisturbed(fleet), streams=4)
    # tritonserver's own connections of clients that have gone stay open for longer behind a jump back.
    broken = [v for v in report.violations if not (v.rule == "descriptors" and "server" in v.what)]
    assert not broken, str(report)
    assert report.ends["ok"] > 5, str(report)
