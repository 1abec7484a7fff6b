"""What was found once does not come back."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import Keeper
from tests.chaos.faults import KINDS
from tests.chaos.found import FOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FOUND))
def test_a_schedule_that_broke_a_promise_breaks_none_now(keeper: Keeper, name: str) -> None:
    report = keeper.storm(FOUND[name].schedule)
    assert not report.violations, str(report)


def test_each_schedule_that_is_kept_names_faults_there_are() -> None:
    assert {fault.kind for found in FOUND.values() for fault in found.schedule.faults} <= KINDS.keys()
