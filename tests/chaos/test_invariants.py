"""What counts as a broken promise: an end that no fault excuses, too late for a machine that was not busy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.chaos.clients import SHIM, Ask, Outcome
from tests.chaos.invariants import Violation, Window, crashes, recovery, requests
from tests.chaos.schedule import Fault

ASK = Ask("asked", "grpc", {}, timeout_s=2.0, known=False)
LATE = Outcome(ASK, "0", 10.0, 16.0, ends=1, error="the request ran past its timeout of 2 s")


@dataclass
class Busy:
    """A machine on which a thread waited for so many seconds, whenever one asks."""

    seconds: float = 0.0

    def late(self, began: float, ended: float) -> float:
        return self.seconds


def broken(outcome: Outcome, *windows: Window, busy_s: float = 0.0) -> list[tuple[str, str]]:
    found = requests([outcome], {}, windows, Busy(busy_s), 0.0)  # type: ignore[arg-type]
    return [(violation.rule, violation.what) for violation in found]


def window(kind: str, began: float, ended: float, **fields: object) -> Window:
    return Window(Fault(began, kind), began, ended, **fields)  # type: ignore[arg-type]


def test_an_end_that_is_late_is_told_with_its_time() -> None:
    ((rule, what),) = broken(LATE)
    assert rule == "deadline"
    assert what.startswith("asked by 0, at 10.0 s for 6.0 s, during no fault: ended 3.0 s after its deadline")
    assert broken(LATE, busy_s=3.0) == []


def test_time_begins_over_tritons_own_ports_when_there_are_frontends() -> None:
    dead = window("kill-frontends", 9.0, 13.0)
    assert broken(LATE, dead) == []
    assert [rule for rule, _ in broken(replace(LATE, door=SHIM), dead)] == ["deadline"]
    assert [rule for rule, _ in broken(LATE, window("kill-frontends", 9.0, 12.0))] == ["deadline"]


def test_a_request_is_lost_when_its_client_waited_long_enough() -> None:
    lost = Outcome(ASK, SHIM, 10.0, 24.0, lost=True)
    assert [rule for rule, _ in broken(lost)] == ["lost"]
    assert broken(lost, busy_s=11.0) == []


@pytest.mark.parametrize(("kind", "excused"), [("kill-server", True), ("kill-engine", False), ("slow-readers", False)])
def test_an_error_needs_a_fault_that_excuses_it(kind: str, excused: bool) -> None:
    cut = Outcome(ASK, "0", 10.0, 11.0, ends=1, error="failed to connect to all addresses")
    assert (broken(cut, window(kind, 9.0, 12.0)) == []) is excused


@pytest.mark.parametrize(("kind", "excused"), [("term-serve", True), ("kill-engine", False)])
def test_a_server_that_is_told_to_stop_ends_what_does_not_end_in_time(kind: str, excused: bool) -> None:
    error = "the server was told to stop and its exit timeout is nearly over"
    ended = Outcome(ASK, "0", 10.0, 11.0, ends=1, error=error)
    assert (broken(ended, window(kind, 9.0, 12.0)) == []) is excused


def test_what_a_fault_promises_counts_where_tritonserver_did_not_abort() -> None:
    failed = window("load-unload", 5.0, 9.0, problem="it does not load")
    aborted = window("kill-server", 7.0, 20.0, aborted=True)
    elsewhere = replace(aborted, fault=Fault(7.0, "kill-server", 1))
    assert recovery([failed, aborted]) == []
    assert [violation.rule for violation in recovery([failed, elsewhere])] == ["recovery"]
    (left,) = recovery([replace(aborted, problem="left 10 s after tritonserver aborted")])
    assert left.what == "7 kill-server 0: left 10 s after tritonserver aborted"


def test_an_engine_that_ends_by_a_mistake_is_told_though_no_stream_shows_it() -> None:
    def failed(why: str) -> str:
        trace = f'Traceback (most recent call last):\n  File "loop.py", line 1, in run\n    x = y\n        ^\n{why}\n'
        return f"nereid demo: the engine's loop failed\n{trace}nereid demo: the engine has failed\n"

    assert crashes("nereid demo: the engine process died; 2 requests wait for the next one\n") == []
    limits = ("MemoryError", "OSError: [Errno 28] No space left on device", "RuntimeError: x: can't allocate memory")
    assert crashes("".join(map(failed, limits))) == []
    mistakes = failed("ValueError: list.remove(x): x not in list") + failed("KeyError: 'a'")
    assert crashes(mistakes) == [
        Violation("crash", "the engine's loop ended by ValueError: list.remove(x): x not in list"),
        Violation("crash", "the engine's loop ended by KeyError: 'a'"),
    ]
