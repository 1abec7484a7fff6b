"""Responses that were asked to be kept, bounded in number and in bytes, and shared by all workers of a shim."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MAX_BYTES = 256 << 20

_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    body BLOB NOT NULL, items BLOB NOT NULL, messages BLOB NOT NULL
)
"""
_SIZE = "LENGTH(body) + LENGTH(items) + LENGTH(messages)"
# The newest stay: those with which neither the count nor the sum of bytes is above its bound.
_TRIM = f"""
DELETE FROM responses WHERE number IN (
    SELECT number FROM (
        SELECT number, ROW_NUMBER() OVER newest AS place, SUM({_SIZE}) OVER newest AS bytes
        FROM responses WINDOW newest AS (ORDER BY number DESC)
    ) WHERE place > ? OR bytes > ?
)
"""


@dataclass(frozen=True)
class Stored:
    """body: as its client got it. items: its input. messages: the conversation up to its end, as chat messages."""

    body: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class ResponseStore:
    """most: how many are kept; the oldest go first. path: a file that the workers share; None keeps them in memory.

    Only the caller that a response belongs to (`owner`) finds it.
    """

    def __init__(self, most: int, path: Path | None = None, most_bytes: int = MAX_BYTES) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._base = sqlite3.connect(path or ":memory:", timeout=30, check_same_thread=False, isolation_level=None)
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute("PRAGMA synchronous=OFF")  # it does not outlive the shim
        self._base.execute("PRAGMA cache_size=-256")  # KiB: the system has the file's pages for all workers
        self._base.execute(_TABLE)

    async def put(self, response_id: str, owner: str, stored: Stored) -> None:
        """A response that is larger than all of them may be together is not kept."""
        encoded = [msgspec.json.encode(part) for part in (stored.body, stored.items, stored.messages)]
        if sum(map(len, encoded)) > self._most_bytes:
            return
        row = (response_id, owner, *encoded)
        await asyncio.to_thread(self._put, row)

    async def get(self, response_id: str, owner: str) -> Stored | None:
        found = await asyncio.to_thread(
            self._run, "SELECT body, items, messages FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
        )
        return Stored(*map(msgspec.json.decode, found[0])) if found else None

    async def delete(self, response_id: str, owner: str) -> bool:
        """Whether it was there."""
        query = "DELETE FROM responses WHERE id = ? AND owner = ? RETURNING id"
        return bool(await asyncio.to_thread(self._run, query, (response_id, owner)))

    def close(self) -> None:
        self._base.close()

    def _put(self, row: Sequence[Any]) -> None:
        self._run("INSERT INTO responses (id, owner, body, items, messages) VALUES (?, ?, ?, ?, ?)", row)
        self._run(_TRIM, (self.most, self._most_bytes))

    def _run(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            return self._base.execute(query, values).fetchall()
