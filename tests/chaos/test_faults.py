"""What another fault undoes is done again: a start whose first load it ended, a load in which it killed a frontend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.faults import Problem, _load, start_again
from tests.chaos.fleet import FleetFailed


class Unlucky:
    """A replica whose starts end so: ready, ended by another fault, or ended by itself."""

    def __init__(self, *starts: str) -> None:
        self.ends = self.begun = 0
        self.kills: Counter[str] = Counter()
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
        self.kills["engine"] += start == "ended by another fault"
        self.kills["worker"] += 1  # which starts nothing
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


class Loading:
    """A replica whose loads end so."""

    def __init__(self, *loads: str) -> None:
        self.begun = 0
        self.kills: Counter[str] = Counter()
        self._loads = loads

    def get(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        load = self._loads[self.begun]
        self.begun += 1
        self.kills["frontend"] += load == "a frontend is killed"
        self.kills["engine"] += 1  # which a load outlives
        return (200 if load == "well" else 400), load.encode()


def test_a_load_in_which_a_frontend_is_killed_is_done_again() -> None:
    replica = Loading("a frontend is killed", "a frontend is killed", "well")
    _load(replica, {})  # type: ignore[arg-type]
    assert replica.begun == 3
    with pytest.raises(Problem, match="fails by itself"):
        _load(Loading("fails by itself", "well"), {})  # type: ignore[arg-type]
