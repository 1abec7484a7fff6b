"""In which order an engine process is given the requests that frontends send: suspects run alone.

A request that kills the engine kills those that run beside it as often as itself. So what was in the engine at several
deaths, and got no token between, is run by itself in the next one, up to its first token: if the engine dies then, one
request alone is to blame, and all others have been kept out of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from engine.serving.link.messages import NOBODY

_GATHER_S = 2.0  # for a frontend to send what it has, which takes milliseconds unless it stands still

Item = TypeVar("Item")


class Quarantine(Generic[Item]):
    """Not thread-safe, but for reads of `alone`.

    submit: gives a request to the engine. tell: says to every frontend what `alone` is from now on, before that is so.
    alone: the id of the one request that runs; NOBODY while none does; None when all do.
    """

    def __init__(
        self,
        submit: Callable[[Item], None],
        tell: Callable[[str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.alone: str | None = NOBODY
        self._submit = submit
        self._tell = tell
        self._clock = clock
        self._awaited: set[str] = set()
        self._until = 0.0
        self._suspects: dict[str, Item] = {}
        self._held: dict[str, Item] = {}

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._suspects) + len(self._held)

    def gather(self, frontends: Iterable[str]) -> None:
        """The engine is ready: wait until each of these has sent what it has."""
        self._awaited = set(frontends)
        self._until = self._clock() + _GATHER_S
        self.look()

    def sent(self, frontend: str) -> None:
        """This one has sent what it had, or is gone."""
        self._awaited.discard(frontend)
        self.look()

    def look(self) -> None:
        """Begin when nobody is waited for any more."""
        if self.alone == NOBODY and self._until and (not self._awaited or self._clock() > self._until):
            self._next()

    def take(self, request_id: str, item: Item, suspect: bool) -> None:
        """A request has come. A suspect that comes late runs beside those that run already, and nothing else begins."""
        if self.alone is not None:
            (self._suspects if suspect else self._held)[request_id] = item
        elif suspect:
            self._suspects[request_id] = item
            self._next()
        else:
            self._submit(item)

    def drop(self, request_ids: Iterable[str]) -> None:
        """These are not wanted any more."""
        for request_id in request_ids:
            self._suspects.pop(request_id, None)
            self._held.pop(request_id, None)

    def passed(self, request_id: str) -> None:
        """The request has got a token, or its end."""
        if request_id == self.alone:
            self._next()

    def _next(self) -> None:
        if self._suspects:
            self.alone = next(iter(self._suspects))
            item = self._suspects.pop(self.alone)
            self._tell(self.alone)
            self._submit(item)
            return
        self.alone = None
        self._tell(None)
        held, self._held = self._held, {}
        for item in held.values():
            self._submit(item)
