"""One storm: clients run, faults happen as the schedule says, then everything is checked."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos import faults, invariants
from tests.chaos.clients import SHIM, Load, Outcome, asks, perform
from tests.chaos.fleet import Fleet, FleetFailed, Replica
from tests.chaos.invariants import Violation, Window
from tests.chaos.schedule import Fault, Schedule
from tests.chaos.watch import Heartbeat, Readiness

STREAMS = 8
_WARM_S = 3.0
_LOOK_S = 0.2
_FIRST_S = 40.0  # after a storm, for a request that is not refused


@dataclass(frozen=True)
class Report:
    """ends: requests by how they ended. late_s: how long the thread worst off waited for a core.
    aborts: how often tritonserver ended by itself."""

    schedule: Schedule
    violations: tuple[Violation, ...]
    ends: Mapping[str, int]
    late_s: float
    aborts: int

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        lines = [f"{self.schedule}", f"  {counts}; a thread waited {self.late_s:.1f} s for a core"]
        lines += [f"  tritonserver aborted {self.aborts} times"] if self.aborts else []
        return "\n".join([*lines, *(f"  BROKEN {v.rule}: {v.what}" for v in self.violations)])


def run(fleet: Fleet, schedule: Schedule, expected: Mapping[str, Outcome], streams: int = STREAMS) -> Report:
    """The storm of `schedule` on a fleet that is well; expected: what its requests are answered with undisturbed.

    Raises FleetFailed when a replica that a fault ended cannot be started again.
    """
    _warm(fleet, schedule.seed, streams)
    before, kept = invariants.measure(fleet), invariants.keeping(fleet)
    logs = {replica.number: len(replica.log()) for replica in fleet.replicas}
    beat, ready, load = Heartbeat(fleet), Readiness(fleet), Load(fleet, schedule.seed, streams)
    beat.start()
    ready.start()
    load.start()
    began = time.monotonic()
    revival = _Revival(fleet, began)
    revival.start()
    weather = [_Weather(fleet, fault, began, beat) for fault in schedule.faults]
    for one in weather:
        one.start()
    time.sleep(schedule.seconds)
    for one in weather:
        one.join()
    outcomes = load.stop()
    looks = ready.stop()
    aborts = revival.stop()
    ended = time.monotonic()
    windows = [*aborts, *(one.window for one in weather if one.window is not None)]
    found = invariants.recovery(windows)
    found += invariants.requests(outcomes, expected, windows, beat, began)
    found += invariants.readiness(looks, windows, beat)
    found += _first_text(fleet, expected)
    found += invariants.leftovers(fleet, before, kept)
    for replica in fleet.replicas:
        found += invariants.crashes(replica.log()[logs[replica.number] :])
    beat.close()
    broken = next((one.broken for one in weather if one.broken is not None), None)
    if broken is not None:
        raise broken
    counts = Counter(map(invariants.classify, outcomes))
    return Report(schedule, tuple(found), counts, beat.late(began, ended), len(aborts))


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

    def __init__(self, fleet: Fleet, fault: Fault, began: float, beat: Heartbeat) -> None:
        super().__init__(name=f"fault-{fault.kind}", daemon=True)
        self._fleet = fleet
        self._fault = fault
        self._beat = beat
        self._due = began + fault.at_s
        self.window: Window | None = None
        self.broken: FleetFailed | None = None

    def run(self) -> None:
        time.sleep(max(0.0, self._due - time.monotonic()))
        began = time.monotonic()
        try:
            problem = faults.apply(self._fleet, self._fault, self._beat)
        except FleetFailed as error:
            self.broken, problem = error, str(error)[:500]
        except Exception as error:
            problem = f"the fault itself failed: {type(error).__name__}: {error}"
        self.window = Window(self._fault, began, time.monotonic(), problem)


class _Revival:
    """Starts a replica again whose tritonserver has aborted by itself, which is known of 2.51. began: the storm."""

    def __init__(self, fleet: Fleet, began: float) -> None:
        self._fleet = fleet
        self._began = began
        self._closing = threading.Event()
        self._windows: list[Window] = []
        self._thread = threading.Thread(target=self._run, name="revival", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Window]:
        """When replicas were not there."""
        self._closing.set()
        self._thread.join()
        return self._windows

    def _run(self) -> None:
        well = dict.fromkeys(self._fleet.replicas, time.monotonic())  # when it did not yet
        while not self._closing.wait(_LOOK_S):
            for replica in self._fleet.replicas:
                looked = time.monotonic()
                if not replica.aborts():
                    well[replica] = looked
                elif not replica.alive():
                    with replica.reviving:
                        self._windows.append(self._revive(replica, well[replica]))

    def _revive(self, replica: Replica, well: float) -> Window:
        problem = None
        try:
            faults.start_again(replica, "tritonserver aborted")
        except (faults.Problem, FleetFailed) as error:
            problem = str(error)[:500]
        fault = Fault(round(well - self._began, 1), "kill-server", replica.number)
        return Window(fault, well, time.monotonic(), problem, aborted=True)
