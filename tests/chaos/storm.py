"""One storm: clients run, faults happen as the schedule says, then everything is checked."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos import faults, invariants
from tests.chaos.clients import SHIM, Load, Outcome, asks, perform
from tests.chaos.fleet import Fleet, FleetFailed
from tests.chaos.invariants import Violation, Window
from tests.chaos.schedule import Fault, Schedule
from tests.chaos.watch import Heartbeat, Readiness

STREAMS = 8
_WARM_S = 3.0
_FIRST_S = 40.0  # after a storm, for a request that is not refused


@dataclass(frozen=True)
class Report:
    """ends: requests by how they ended. late_s: how long the thread worst off waited for a core."""

    schedule: Schedule
    violations: tuple[Violation, ...]
    ends: Mapping[str, int]
    late_s: float

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        lines = [f"{self.schedule}", f"  {counts}; an engine waited {self.late_s:.1f} s for a core"]
        return "\n".join([*lines, *(f"  BROKEN {v.rule}: {v.what}" for v in self.violations)])


def run(fleet: Fleet, schedule: Schedule, expected: Mapping[str, Outcome], streams: int = STREAMS) -> Report:
    """The storm of `schedule` on a fleet that is well; expected: what its requests are answered with undisturbed.

    Raises FleetFailed when a replica that a fault ended cannot be started again.
    """
    _warm(fleet, schedule.seed, streams)
    before = invariants.measure(fleet)
    beat, ready, load = Heartbeat(fleet), Readiness(fleet), Load(fleet, schedule.seed, streams)
    beat.start()
    ready.start()
    load.start()
    began = time.monotonic()
    weather = [_Weather(fleet, fault, began) for fault in schedule.faults]
    for one in weather:
        one.start()
    time.sleep(schedule.seconds)
    for one in weather:
        one.join()
    outcomes = load.stop()
    looks = ready.stop()
    ended = time.monotonic()
    windows = [one.window for one in weather if one.window is not None]
    found = [Violation("recovery", f"{w.fault}: {w.problem}") for w in windows if w.problem is not None]
    found += invariants.requests(outcomes, expected, windows, beat)
    found += invariants.readiness(looks, windows, beat)
    found += _first_text(fleet, expected)
    found += invariants.leftovers(fleet, before)
    beat.close()
    broken = next((one.broken for one in weather if one.broken is not None), None)
    if broken is not None:
        raise broken
    return Report(schedule, tuple(found), Counter(map(invariants.classify, outcomes)), beat.late(began, ended))


def _warm(fleet: Fleet, seed: int, streams: int) -> None:
    """Pools of threads and connections are as large as they get before anything is measured."""
    load = Load(fleet, seed, streams)
    load.start()
    time.sleep(_WARM_S)
    load.stop()


def _first_text(fleet: Fleet, expected: Mapping[str, Outcome]) -> list[Violation]:
    """The first prompt gives the first tokens, on each replica and through the shim."""
    found = []
    kinds = {ask.name: ask for ask in asks()}
    end = time.monotonic() + _FIRST_S
    for name, door in (("grpc-0", "0"), ("grpc-0", "1"), ("sse-0", SHIM), ("chat-0", SHIM)):
        outcome = perform(fleet, kinds[name], door)
        while outcome.error is not None and time.monotonic() < end:
            time.sleep(1.0)
            outcome = perform(fleet, kinds[name], door)
        if outcome.tokens != expected[name].tokens:
            end_word = invariants.classify(outcome)
            found.append(Violation("first-text", f"{name} by {door} after the storm: {end_word} {outcome.error}"))
    return found


class _Weather(threading.Thread):
    """One fault at its time. window: when it was at work, once it is over."""

    def __init__(self, fleet: Fleet, fault: Fault, began: float) -> None:
        super().__init__(name=f"fault-{fault.kind}", daemon=True)
        self._fleet = fleet
        self._fault = fault
        self._due = began + fault.at_s
        self.window: Window | None = None
        self.broken: FleetFailed | None = None

    def run(self) -> None:
        time.sleep(max(0.0, self._due - time.monotonic()))
        began = time.monotonic()
        try:
            problem = faults.apply(self._fleet, self._fault)
        except FleetFailed as error:
            self.broken, problem = error, str(error)[:500]
        except Exception as error:
            problem = f"the fault itself failed: {type(error).__name__}: {error}"
        self.window = Window(self._fault, began, time.monotonic(), problem)
