"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from clients.openai.errors import CLIENT_CLOSED, ApiError, BackendError

DONE = b"data: [DONE]\n\n"

Failed = Callable[[ApiError], bytes]


class ClientGone(ApiError):
    """The client closed the connection. Nobody reads the answer; the log shows 499."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED, "The client closed the connection.")


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@contextlib.asynccontextmanager
async def connected(receive: Receive) -> AsyncIterator[None]:
    """While the block runs the client is watched: when it goes, the block is cancelled and ClientGone raised.

    The request's body must have been read. One task a request, whatever the block awaits.
    """
    worker = asyncio.current_task()
    assert worker is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        worker.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException as error:
        if not gone:
            raise
        await _take_back(worker, met=isinstance(error, asyncio.CancelledError))
        raise ClientGone from None
    finally:
        watcher.cancel()
    if gone:
        await _take_back(worker, met=False)
        raise ClientGone


async def _take_back(worker: asyncio.Task[Any], met: bool) -> None:
    """Undo a cancellation of the running task. met: it has come already, else it does at the next await."""
    if not met:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
    if sys.version_info >= (3, 11):
        worker.uncancel()


class EventStream(Response):
    """Sends `head`, then what `events` yields, each an encoded event, then `done`. `events` is closed whatever happens.

    An error after the first event is sent as the event that `failed` makes of it; then the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, head: bytes, events: AsyncGenerator[bytes, None], done: bytes, failed: Failed) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._head = head
        self._events = events
        self._done = done
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with connected(receive):
                await self._send(send)
        except ClientGone:
            scope["nereid.trace"].gone = True  # the status was sent long ago; the log and the metrics say 499
        finally:
            with contextlib.suppress(RuntimeError):
                await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._head, "more_body": True})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = self._done
        except (ApiError, BackendError) as error:
            last = self._failed(error.to_api() if isinstance(error, BackendError) else error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _error_event(error: ApiError) -> bytes:
    return event(error.body()) + DONE


async def start_stream(
    receive: Receive, events: AsyncGenerator[bytes, None], done: bytes = DONE, failed: Failed = _error_event
) -> EventStream:
    """Wait for the first event, so that an error before it still has a status of its own."""
    try:
        async with connected(receive):
            head = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(head, events, done, failed)
