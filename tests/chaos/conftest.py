"""One fleet for all tests here, made anew behind a storm that broke a promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import storm
from tests.chaos.clients import Outcome, undisturbed
from tests.chaos.fleet import Fleet
from tests.chaos.schedule import Schedule


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They share a fleet, so they share a worker."""
    for item in items:
        if "tests/chaos/" in str(item.path):
            item.add_marker(pytest.mark.xdist_group("chaos"))
            item.add_marker(pytest.mark.timeout(400))


class Keeper:
    """Has a fleet that is well."""

    def __init__(self) -> None:
        self._fleet: Fleet | None = None
        self._expected: dict[str, Outcome] = {}

    def fleet(self) -> Fleet:
        if self._fleet is None:
            self._fleet = Fleet().__enter__()
            self._expected = undisturbed(self._fleet)
        return self._fleet

    def storm(self, schedule: Schedule, streams: int = storm.STREAMS) -> storm.Report:
        fleet = self.fleet()
        try:
            report = storm.run(fleet, schedule, self._expected, streams)
        except BaseException:
            self.discard()
            raise
        if report.violations:
            self.discard()
        return report

    def discard(self) -> None:
        """The next test gets another fleet."""
        if self._fleet is not None:
            self._fleet.__exit__(None, None, None)
            self._fleet = None


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.discard()
