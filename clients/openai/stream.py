"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from clients.openai.errors import CLIENT_CLOSED, ApiError, BackendError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(ApiError):
    """The client closed the connection. Nobody reads the answer; the log shows 499."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED, "The client closed the connection.")


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Sends `head`, then what `events` yields, each an encoded event. `events` is closed whatever happens.

    An error after the first event is sent as an event of its own; then the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, head: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | (headers or {}))
        del self.headers["content-length"]
        self._head = head
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
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
        except (ApiError, BackendError) as error:
            answer = error.to_api() if isinstance(error, BackendError) else error
            await send({"type": "http.response.body", "body": event(answer.body()) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def start_stream(
    receive: Receive, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None
) -> EventStream:
    """Wait for the first event, so that an error before it still has a status of its own."""
    try:
        head = await while_connected(receive, _first(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(head, events, headers)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await events.__anext__()
