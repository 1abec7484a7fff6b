"""Ends streams whose clients have gone, which only Triton knows, those that are past their time, and all of a server
that is about to exit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engine.serving.frontend.sender import Sender
from engine.serving.frontend.stream import Stream, now
from engine.serving.frontend.stream_table import StreamTable
from engine.types import ErrorCode, FinishReason

logger = logging.getLogger("nereid.frontend")

_WATCH_S = 0.02
_LATE_S = 0.3  # the engine ends a request that is past its time, unless it hangs, restarts or has not got it yet
_ASK_SHARE = 10  # of the time, at most one part in so many goes into asking
_END_S = 0.25  # between looks whether the server is about to exit
_MAX_PAUSE_S = 1.0  # all the same, for what took long may have been a server that stood still
_EXITS = "the server was told to stop and its exit timeout is nearly over"


class ClientWatch:
    """One thread, which rests while the table is empty. It has no lock.

    verbose: writes to the server's verbose log, in vllm_backend's words, which people look for there. must_end: whether
    the server's exit timeout is nearly over."""

    def __init__(
        self, table: StreamTable, sender: Sender, verbose: Callable[[str], None], must_end: Callable[[], bool]
    ) -> None:
        self._table = table
        self._sender = sender
        self._verbose = verbose
        self._must_end = must_end
        self._closing = threading.Event()
        self._busy = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nereid-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._busy.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """A stream has come."""
        self._busy.set()

    def _run(self) -> None:
        asked, pause, looked = now(), _WATCH_S, 0.0
        while not self._closing.wait(_WATCH_S):
            if not self._table:
                self._busy.clear()
                if not self._table and not self._closing.is_set():
                    self._busy.wait()
                    continue  # whoever has just come has not gone yet, and asking takes the server's time
            began = now()
            streams = self._table.all()
            for stream in [s for s in streams if began - s.arrived > s.timeout_s + _LATE_S]:
                # In the engine's own words, for it could not say so.
                done = f"{len(stream.received)} tokens generated"
                sentence = f"the request ran past its timeout of {stream.timeout_s:g} s with {done}"
                self._end(stream, sentence, ErrorCode.UNAVAILABLE, FinishReason.ERROR)
            if began - looked > _END_S:
                looked = began
                if self._must_end():
                    for stream in streams:
                        self._end(stream, _EXITS, ErrorCode.UNAVAILABLE, FinishReason.ERROR)
                    continue
            if began - asked < pause:
                continue
            for stream in [s for s in streams if is_cancelled(s)]:
                sentence = "the request was cancelled by its client"
                self._verbose(f"[vllm] Cancelling the request {stream.request_id}")
                self._end(stream, sentence, ErrorCode.CANCELLED, FinishReason.CANCELLED)
                self._verbose(f"[vllm] Successfully cancelled the request {stream.request_id}")
            asked = now()
            pause = min(max(_WATCH_S, _ASK_SHARE * (asked - began)), _MAX_PAUSE_S)

    def _end(self, stream: Stream, sentence: str, code: ErrorCode, reason: FinishReason) -> None:
        self._table.abort([stream])
        self._sender.end(stream, sentence, code, reason)


def is_cancelled(stream: Stream) -> bool:
    """Whether the client of a stream has gone, as Triton says."""
    with stream.ending:
        if stream.ended or (stream.choices is not None and stream.choices.open[:1] != [stream]):
            return False  # one answer of a request asks for all
        try:
            return bool(stream.sender.is_cancelled())
        except Exception:  # as when shared memory is full: asked again at the next look
            logger.debug("%s: whether its client has gone cannot be asked", stream.request_id, exc_info=True)
            return False
