"""What the parts of a stub know together of the model's engine process."""

from __future__ import annotations

import threading
import time

_SILENT_S = 1.0  # an engine process says how it is ten times a second


class EngineView:
    """Each field has one writer, and may be read from any thread.

    ready: an engine takes requests now. served: one has, some time. settled: ready, or failed. failed: why no engine
    will come any more. blamed: deaths of engines that ran one request alone, which is no fault of the engine. heard:
    when an engine that is up said something last, None while none is. lost: when the last one that was up ended.
    leading: this process sees to the engine.
    """

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.served = threading.Event()
        self.settled = threading.Event()
        self.failed: str | None = None
        self.blamed = 0
        self.heard: float | None = None
        self.lost: float | None = None
        self.leading = False

    @property
    def silent_s(self) -> float:
        """Seconds since the engine was last heard; 0 while it is not up."""
        heard = self.heard
        return 0.0 if heard is None else time.monotonic() - heard

    @property
    def problem(self) -> str:
        """Why a request would wait for the engine now, as a sentence; empty when it would not."""
        if self.failed is not None:
            return self.failed
        if self.silent_s > _SILENT_S:
            return f"the engine process has said nothing for {self.silent_s:.0f} s"
        lost = self.lost
        if self.heard is None and lost is not None and time.monotonic() - lost > _SILENT_S:
            return "the engine process ended, and the next one is not there yet"
        return ""
