"""A replica that a fault ended is started again, as often as another fault ends its first load, and no more often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.faults import start_again
from tests.chaos.fleet import FleetFailed


class Unlucky:
    """A replica whose starts end so: ready, ended by another fault, or ended by itself."""

    def __init__(self, *starts: str) -> None:
        self.faults = self.ends = self.begun = 0
        self._starts = starts

    def members(self) -> Iterator[Any]:
        return iter(())

    def listens(self) -> bool:
        return False

    def wipe(self) -> list[str]:
        return []

    def alive(self) -> bool:
        return False

    def start(self) -> None:
        self.begun += 1

    def wait_ready(self) -> None:
        start = self._starts[self.begun - 1]
        self.faults += start == "ended by another fault"
        if start != "ready":
            raise FleetFailed(start)


def test_what_another_fault_ends_in_its_first_load_is_started_once_more() -> None:
    replica = Unlucky("ended by another fault", "ready")
    start_again(replica, "SIGKILL of the server")  # type: ignore[arg-type]
    assert replica.begun == 2


def test_what_ends_by_itself_is_a_broken_promise() -> None:
    replica = Unlucky("ended by itself", "ready")
    with pytest.raises(FleetFailed, match="by itself"):
        start_again(replica, "SIGKILL of the server")  # type: ignore[arg-type]
    assert replica.begun == 1
