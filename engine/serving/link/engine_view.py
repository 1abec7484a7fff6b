"""What the parts of a stub know together of the model's engine process."""

from __future__ import annotations

import threading
import time


class EngineView:
    """Each field has one writer, and may be read from any thread.

    ready: an engine takes requests now. served: one has, some time. settled: ready, or failed. failed: why no engine
    will come any more. blamed: deaths of engines that ran one request alone, which is no fault of the engine. heard:
    when an engine that is up said something last, None while none is. leading: this process sees to the engine.
    """

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.served = threading.Event()
        self.settled = threading.Event()
        self.failed: str | None = None
        self.blamed = 0
        self.heard: float | None = None
        self.leading = False

    @property
    def silent_s(self) -> float:
        """Seconds since the engine was last heard; 0 while it is not up."""
        heard = self.heard
        return 0.0 if heard is None else time.monotonic() - heard
