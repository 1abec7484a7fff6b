"""Clients that asked for an empty prefix cache, until the engine has said that it is."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

MAX_OPEN = 64


class Resets:
    """Safe to use from any thread. answer: sends the only response of a request."""

    def __init__(self, answer: Callable[[Any], None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, Any] = {}

    def add(self, sender: Any) -> int | None:
        """The number of one more; None when too many are open."""
        with self._lock:
            if len(self._open) >= MAX_OPEN:
                return None
            number = next(self._numbers)
            self._open[number] = sender
            return number

    def done(self, number: int) -> None:
        """It happened. A number that was answered before is ignored."""
        with self._lock:
            sender = self._open.pop(number, None)
        if sender is not None:
            self._answer(sender)

    def all_done(self) -> None:
        """The engine is gone, and its cache with it."""
        for number in list(self._open):
            self.done(number)
