"""Noticing that a client has gone, whatever the request is waiting for at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from clients.openai.errors import BackendError
from clients.openai.stream import ClientGone, connected


class Client:
    """The receiving end of a connection."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def watched(block: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        client = Client()
        try:
            async with connected(client.receive):
                await block(client)
        finally:
            await asyncio.sleep(0.01)  # a cancellation left behind would come here
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_block_that_ends_is_left_alone() -> None:
    async def block(_: Client) -> None:
        await asyncio.sleep(0)

    watched(block)


def test_a_block_that_waits_is_cancelled_when_the_client_goes() -> None:
    cleaned = []

    async def block(client: Client) -> None:
        client.gone.set()
        try:
            await asyncio.sleep(30)
        finally:
            cleaned.append(True)

    with pytest.raises(ClientGone):
        watched(block)
    assert cleaned


def test_a_client_that_goes_as_the_block_ends_leaves_no_cancellation_behind() -> None:
    async def block(client: Client) -> None:
        await asyncio.sleep(0)  # the watcher waits by now
        client.gone.set()
        for _ in range(3):
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                return

    with pytest.raises(ClientGone):
        watched(block)


def test_a_failure_of_the_block_is_its_own() -> None:
    async def block(_: Client) -> None:
        raise BackendError("UNAVAILABLE", "no")

    with pytest.raises(BackendError):
        watched(block)


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def main() -> None:
        async def work() -> None:
            async with connected(Client().receive):
                await asyncio.sleep(30)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
