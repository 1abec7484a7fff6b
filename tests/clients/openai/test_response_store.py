"""Kept responses are bounded in number and in bytes, and found by their owner alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clients.openai.responses.store import ResponseStore, Stored


def stored(text: str) -> Stored:
    return Stored({"text": text}, [{"type": "message"}], [{"role": "user", "content": text}])


def test_the_newest_stay() -> None:
    async def check() -> None:
        store = ResponseStore(3)
        for number in range(5):
            await store.put(f"r{number}", "me", stored(str(number)))
        found = [await store.get(f"r{number}", "me") for number in range(5)]
        assert [each and each.body["text"] for each in found] == [None, None, "2", "3", "4"]
        store.close()

    asyncio.run(check())


def test_bytes_are_bounded_too() -> None:
    async def check() -> None:
        store = ResponseStore(100, most_bytes=5000)
        for number in range(5):
            await store.put(f"r{number}", "me", stored("x" * 1000))  # 2,000 bytes and some
        assert [await store.get(f"r{number}", "me") is not None for number in range(5)] == [False] * 3 + [True] * 2
        await store.put("huge", "me", stored("x" * 10_000))
        assert await store.get("huge", "me") is None, "what is above the bound by itself is not kept"
        assert await store.get("r4", "me") is not None, "and takes no other's place"
        store.close()

    asyncio.run(check())


def test_owners_do_not_see_one_another(tmp_path: Path) -> None:
    async def check() -> None:
        one, other = ResponseStore(10, tmp_path / "responses"), ResponseStore(10, tmp_path / "responses")
        await one.put("r", "me", stored("mine"))
        assert await other.get("r", "you") is None
        assert not await other.delete("r", "you")
        assert await other.get("r", "me") == stored("mine")
        assert await other.delete("r", "me")
        assert await one.get("r", "me") is None
        one.close()
        other.close()

    asyncio.run(check())


@pytest.mark.parametrize("most", [0, 1])
def test_small_stores(most: int) -> None:
    async def check() -> None:
        store = ResponseStore(most)
        await store.put("a", "", stored("a"))
        await store.put("b", "", stored("b"))
        assert await store.get("a", "") is None
        assert (await store.get("b", "") is not None) == bool(most)
        store.close()

    asyncio.run(check())
