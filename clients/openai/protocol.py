"""Bounds on what a connection sends before its request counts: bytes of headers, and the time that they take.

uvicorn's protocol over httptools has neither: it keeps one header of any length, and waits for its end for ever.
Nothing is parsed here. The parser says what it has found, and what it takes in without finding anything is counted.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from clients.openai.config import ShimConfig
from clients.openai.errors import ApiError

_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Past a bound the client gets 408 or 431, and the connection ends."""

    max_header_bytes: ClassVar[int]
    header_timeout_s: ClassVar[float]

    _heading = False  # a request has begun and its headers have not ended
    _found = False  # something in the bytes that the parser is being fed
    _unfinished = 0  # bytes since it last found something
    _timer: asyncio.TimerHandle | None = None
    _silent = True  # not a byte has come
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._silent = self._found = False
        super().data_received(data)
        self._unfinished = 0 if self._found else self._unfinished + len(data)
        if self._unfinished > self.max_header_bytes:
            self._refuse(431)
        elif self._heading and self._timer is None:
            self._await_headers()  # of a further request of this connection

    def send_400_response(self, msg: str) -> None:
        """The parser has stopped: by itself, or because of a refusal."""
        if not self._refused:
            super().send_400_response(msg)

    # What the parser finds. Of headers one by one it keeps a list; trailers are bytes without a find.

    def on_message_begin(self) -> None:
        self._found = self._heading = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._found, self._heading = True, False
        self._stop_timer()
        if len(self.url) + sum([len(name) + len(value) for name, value in self.headers]) > self.max_header_bytes:
            self._refuse(431)
            raise ValueError("the headers are too long")  # which stops the parser
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._found = True
        super().on_body(body)

    # The time that headers take

    @property
    def _idle(self) -> bool:
        """No request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._on_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        if self._idle:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """End the connection; with an answer, unless nothing was asked or another answer is under way."""
        self._refused = True
        if self._idle and not self._silent and not self.transport.is_closing():
            self.transport.write(refusal(status, self.max_header_bytes, self.header_timeout_s))
        self.transport.close()


def refusal(status: int, max_header_bytes: int, header_timeout_s: float) -> bytes:
    """The whole answer, headers and body."""
    sentence = {
        408: f"The request's headers did not arrive within {header_timeout_s:g} seconds.",
        431: f"The request's headers may hold at most {max_header_bytes} bytes here.",
    }[status]
    body = json.dumps(ApiError(status, sentence).body()).encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def protocol_of(config: ShimConfig) -> type[BoundedProtocol]:
    """The protocol with the bounds of `config`."""
    bounds: dict[str, Any] = {
        "max_header_bytes": config.max_header_bytes,
        "header_timeout_s": config.header_timeout_s,
    }
    return type("BoundedProtocol", (BoundedProtocol,), bounds)
