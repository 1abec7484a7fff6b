"""How long others have been silent while this process ran itself: one that stood still heard nobody, as when all
processes of a container are paused."""

from __future__ import annotations

import time
from collections.abc import Callable

STILL_S = 1.0  # without a look, or without a beat, a process does not run


class Watcher:
    """Looks at other processes, with a short pause between two looks: `look` begins one, `rest` ends it.

    now: when the last look began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.now = self._rested = self._runs_since = clock()

    def look(self) -> None:
        self.now = self._clock()
        if self.now - self._rested > STILL_S:
            self._runs_since = self.now

    def rest(self) -> None:
        self._rested = self._clock()

    def counted(self, silent_s: float) -> float:
        """Of the seconds for which another has been silent, those since this process last stood still."""
        return min(silent_s, self.now - self._runs_since)
