"""The streams that are open, together with what the engine was told about them: one lock over both."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from engine.serving.frontend.stream import Stream
from engine.serving.link.engine_view import EngineView
from engine.serving.link.link import Link
from engine.serving.link.messages import NOBODY
from engine.types import ErrorCode, RequestError

_SUSPECT_DEATHS = 2  # of engines that ran a request, without a token between: it may be what they die of
_MAX_DEATHS = 3  # the last of them while it ran alone
_DOWN = "the engine process of model {model!r} is not there: {why}"


class StreamTable:
    """Safe to use from any thread.

    max_held: streams that may wait while no engine is up. engine: written to as engines come and go.
    """

    def __init__(self, model: str, link: Link, engine: EngineView, max_held: int) -> None:
        self._model = model
        self._link = link
        self._engine = engine
        self._max_held = max_held
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._streams: dict[str, Stream] = {}
        self._up = False
        self._alone: str | None = NOBODY

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, request_id: str) -> Stream | None:
        return self._streams.get(request_id)

    def all(self) -> list[Stream]:
        with self._lock:
            return list(self._streams.values())

    def add(self, streams: Iterable[Stream]) -> None:
        """From here on they end in time. Raises RequestError when no engine will come, or too many wait for one."""
        with self._lock:
            if self._engine.failed is not None:
                raise RequestError(self.down(self._engine.failed), ErrorCode.UNAVAILABLE)
            if not self._up and len(self._streams) >= self._max_held:
                why = f"it is being restarted and {len(self._streams)} requests wait for it already"
                raise RequestError(self.down(why), ErrorCode.UNAVAILABLE)
            self._streams.update({stream.request_id: stream for stream in streams})

    def submit(self, streams: Iterable[Stream]) -> None:
        """Send what is still open to the engine: now, or when there is one."""
        with self._lock:
            for stream in streams:
                if stream.request_id not in self._streams:
                    continue  # it ended meanwhile
                stream.submitted = True
                if self._up and stream.asks:
                    self._link.submit(stream.engine_request())

    def reset_prefix_cache(self, number: int) -> bool:
        """Whether there is an engine that was told."""
        with self._lock:
            if self._up:
                self._link.reset_prefix_cache(number)
            return self._up

    def drop(self, streams: Iterable[Stream]) -> None:
        with self._empty:
            for stream in streams:
                self._streams.pop(stream.request_id, None)
            if not self._streams:
                self._empty.notify_all()

    def abort(self, streams: Iterable[Stream]) -> None:
        """Forget them, and have the engine forget them."""
        request_ids = [stream.request_id for stream in streams]
        with self._lock:
            for request_id in request_ids:
                self._streams.pop(request_id, None)
            self._link.abort(request_ids)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no stream is left. False when some are left after `timeout_s`."""
        with self._empty:
            return self._empty.wait_for(lambda: not self._streams, timeout_s)

    def down(self, why: str) -> str:
        """What requests hear that no engine runs."""
        return _DOWN.format(model=self._model, why=why)

    # What the link says

    def engine_came(self) -> None:
        """Send it what was in flight, those apart that engines have died of."""
        with self._lock:
            self._up = True
            self._alone = NOBODY
            for stream in self._streams.values():
                if stream.submitted and stream.asks and stream.deaths < _MAX_DEATHS:
                    self._link.submit(stream.engine_request(), suspect=stream.deaths >= _SUSPECT_DEATHS)
        self._engine.served.set()
        self._engine.ready.set()
        self._engine.settled.set()

    def engine_runs_alone(self, request_id: str | None) -> None:
        with self._lock:
            self._alone = request_id

    def engine_died(self) -> Sequence[Stream]:
        """Counts the death against the requests that the engine ran: none while it started. Returns those that are
        not tried again."""
        with self._lock:
            alone, given_up = self._alone, []
            self._engine.blamed += self._up and alone is not None and alone != NOBODY
            for stream in self._streams.values():
                if self._up and stream.submitted and alone in (None, stream.request_id):
                    stream.deaths += 1
                    if stream.deaths >= _MAX_DEATHS:
                        given_up.append(stream)
            self._up = False
            self._engine.ready.clear()
        return given_up

    def engine_failed(self, sentence: str) -> Sequence[Stream]:
        """No engine will come any more. Returns the streams that are left, which end by that."""
        with self._lock:
            self._engine.failed = sentence
            self._up = False
            return list(self._streams.values())
