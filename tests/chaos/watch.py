"""Watch while a storm runs: how long processes wait for a core, and whether `/ready` tells the truth each second."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.clients import Ask, Outcome, perform
from tests.chaos.fleet import Fleet

PROBE_S = 5.0
_BEAT_S = 0.25
_LOOK_BEATS = 4  # between looks for processes that are new
_LOOK_S = 1.0
PROBE = Ask(
    "probe",
    "grpc",
    {"text_input": "a", "sampling": {"max_tokens": 1, "temperature": 0.0, "priority": -1000}},
    timeout_s=4 * PROBE_S,
    known=False,
)


class Heartbeat:
    """Measures what a busy machine costs: how late this process is woken, and how long threads of the fleet were ready
    to run and had no core (the second number of /proc/PID/task/TID/schedstat, in nanoseconds; Linux,
    Documentation/scheduler/sched-stats)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ends: list[float] = []  # of beats, rising
        self._late: list[float] = [0.0]  # seconds late in all, up to each
        self._waited: dict[Path, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def late(self, began: float, ended: float) -> float:
        """Seconds, between two moments, that the thread worst off waited for a core."""
        first, last = bisect.bisect_left(self._ends, began), bisect.bisect_right(self._ends, ended)
        return self._late[last] - self._late[first]

    def _run(self) -> None:
        beats, pids = 0, []
        while not self._closing.is_set():
            if beats % _LOOK_BEATS == 0:
                pids = [pid for part in (self._fleet.shim, *self._fleet.replicas) for pid, _ in part.members()]
            began = time.monotonic()
            self._closing.wait(_BEAT_S)
            ended = time.monotonic()
            starved = self._starved(pids)
            if beats:
                self._late.append(self._late[-1] + min(ended - began, max(ended - began - _BEAT_S, starved)))
                self._ends.append(ended)
            beats += 1

    def _starved(self, pids: list[int]) -> float:
        """The most that one thread has waited for a core since the last look, in seconds."""
        waited: dict[Path, int] = {}
        for task in (task for pid in pids for task in _threads(pid)):
            with contextlib.suppress(OSError, IndexError):
                waited[task] = int(task.read_text().split()[1])
        most = max((now - self._waited.get(task, 0) for task, now in waited.items()), default=0)
        self._waited = waited
        return most / 1e9


def _threads(pid: int) -> list[Path]:
    """The statistics of a process's threads; none when it has ended."""
    try:
        return list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    except OSError:  # it ended meanwhile
        return []


@dataclass(frozen=True)
class Look:
    """What the shim says of a replica at a moment. probe: how a request sent then ended; None when it said no."""

    replica: int
    at: float
    ready: bool
    probe: Outcome | None


class Readiness:
    """Asks the shim each second whether a replica is ready, and one that is for a token."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._looks: list[Look] = []
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"readiness-{n}", daemon=True)
            for n in range(len(fleet.replicas))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Look]:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        return sorted(self._looks, key=lambda look: look.at)

    def _run(self, number: int) -> None:
        replica = self._fleet.replicas[number]
        while not self._closing.is_set():
            at = time.monotonic()
            ready = self._fleet.shim.says_ready(replica)
            replica.note_regions()
            look = Look(number, at, ready, perform(self._fleet, PROBE, str(number)) if ready else None)
            with self._lock:
                self._looks.append(look)
            self._closing.wait(max(0.0, at + _LOOK_S - time.monotonic()))
