"""What came for streams, out to clients: tokens become text and responses, in threads of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.serving.frontend import choices
from engine.serving.frontend.metrics import Metrics
from engine.serving.frontend.responses import Responses, unexpected
from engine.serving.frontend.stream import Stream, now
from engine.serving.frontend.stream_table import StreamTable
from engine.types import ErrorCode, FinishReason, TokenEvent

if TYPE_CHECKING:
    from engine.serving.frontend.spans import EngineSpans

logger = logging.getLogger("nereid.frontend")


class Sender:
    """`threads` of them. What came for a stream while its thread was busy goes out as one response.

    It has no lock: a stream keeps to one thread, so its responses stay in order, and whoever sends holds
    `stream.sending`.
    """

    def __init__(
        self, table: StreamTable, responses: Responses, metrics: Metrics, spans: EngineSpans | None, threads: int
    ) -> None:
        self._table = table
        self._responses = responses
        self._metrics = metrics
        self._spans = spans
        self._outgoing: list[queue.SimpleQueue[Stream | None]] = [queue.SimpleQueue() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(outgoing,), name="nereid-sender", daemon=True)
            for outgoing in self._outgoing
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Send what is queued, and end the threads."""
        for outgoing in self._outgoing:
            outgoing.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def enqueue(self, stream: Stream) -> None:
        """Something came for a stream: its thread is to send it."""
        if not stream.queued:
            stream.queued = True
            self._outgoing[stream.serial % len(self._outgoing)].put(stream)

    def send_or_enqueue(self, stream: Stream) -> None:
        """Send it from the calling thread, unless somebody else does or is about to."""
        if stream.choices is None and not stream.queued and stream.sending.acquire(blocking=False):
            try:
                self._send(stream)
            finally:
                stream.sending.release()
        else:
            self.enqueue(stream)

    def end(
        self,
        stream: Stream,
        sentence: str,
        code: ErrorCode = ErrorCode.UNAVAILABLE,
        reason: FinishReason = FinishReason.ERROR,
    ) -> None:
        """End a stream by an event that did not come from the engine."""
        event = TokenEvent(stream.request_id, [], finish_reason=reason, error=sentence, error_code=code)
        stream.pending.append(event)
        self.enqueue(stream)

    def _run(self, outgoing: queue.SimpleQueue[Stream | None]) -> None:
        while (stream := outgoing.get()) is not None:
            stream.queued = False  # before draining: what comes from now on queues the stream again
            with stream.sending:
                self._send(stream)

    def _send(self, stream: Stream) -> None:
        """Send what came for the request of a stream. The caller holds `stream.sending`."""
        if stream.ended:
            return
        members = [stream] if stream.choices is None else stream.choices.streams
        try:
            taken = choices.take(stream)
            if taken.stop:
                self._table.abort(taken.stop)
            if taken.finished:
                self._table.drop(taken.finished if taken.reason is None else ())
            if not taken.answers:
                return
            *before, last = taken.answers
            for answer in before:
                self._responses.send(answer, False)
            if taken.reason is None:
                self._responses.send(last, False)
            else:
                figures = stream.figures() if stream.choices is None else stream.choices.figures()
                self._metrics.finished(taken.reason, now() - stream.arrived, figures)
                if self._spans is not None:
                    self._spans.finished(stream, taken.reason.value, figures)
                with stream.ending:
                    _mark_ended(members)
                    self._responses.send(last, True)
        except Exception:
            sentence = unexpected(logger)
            self._table.abort(members)
            wanted = stream.request.wanted
            with stream.ending:
                _mark_ended(members)
                self._responses.send_error(stream.sender, sentence, ErrorCode.INTERNAL, wanted.error, wanted.text)
        if stream.ended:
            _let_go(members)
            self._table.drop(members)


def _mark_ended(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.ended = True


def _let_go(streams: Iterable[Stream]) -> None:
    """Of the server's own things, which stand in its memory: those that the interpreter finds at its end, when that
    memory has gone, end the stub by a segfault."""
    for stream in streams:
        stream.sender = None
