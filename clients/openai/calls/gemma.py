"""Gemma's notation of a call: `call:NAME{KEY:VALUE,...}`. Names of keys stand bare, strings between two quote markers,
with nothing escaped; lists, objects, numbers, true, false and null are as in JSON but for that."""

from __future__ import annotations

import json
import re
from typing import Any

_HEAD = re.compile(r"\s*call:\s*([^\s{]+)\s*(?=\{)")
_BARE = re.compile(r"[^,\]}]*")
_KEY = re.compile(r"[^:,{}]*")
_SPACE = re.compile(r"\s*")
_MAX_DEPTH = 64
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "None": None}


def call(text: str, quote: str) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of a call; None where it cannot be read."""
    head = _HEAD.match(text)
    if head is None:
        return None
    reader = _Reader(text, head.end(), quote)
    try:
        arguments = reader.value(0)
    except ValueError:
        return None
    return None if reader.left() or not isinstance(arguments, dict) else (head[1], arguments)


class _Reader:
    """One pass over a text. Methods raise ValueError for what is no value."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text = text
        self._at = at
        self._quote = quote

    def left(self) -> str:
        return self._text[self._at :].strip()

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        self._skip()
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            return self._list(depth)
        return self._string() if self._text.startswith((self._quote, '"'), self._at) else self._word()

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._ends("}", bool(found)):
            key = self._string() if self._text.startswith((self._quote, '"'), self._at) else self._match(_KEY).strip()
            self._skip()
            if not key or not self._take(":"):
                raise ValueError("a key without a value")
            found[key] = self.value(depth + 1)
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._ends("]", bool(found)):
            found.append(self.value(depth + 1))
        return found

    def _ends(self, closing: str, begun: bool) -> bool:
        """Whether a list ends here; else what separates two of its items is passed."""
        self._skip()
        if self._take(closing):
            return True
        if begun and not self._take(","):
            raise ValueError("two values and nothing between them")
        self._skip()
        return False

    def _string(self) -> str:
        if self._take(self._quote):
            end = self._text.find(self._quote, self._at)
            if end < 0:
                raise ValueError("a string without an end")
            found, self._at = self._text[self._at : end], end + len(self._quote)
            return found
        value, self._at = json.JSONDecoder().raw_decode(self._text, self._at)  # as models write it sometimes
        if not isinstance(value, str):
            raise ValueError("no string")
        return value

    def _word(self) -> Any:
        """A number, true, false or null; anything else is text that a model forgot to quote."""
        word = self._match(_BARE).strip()
        if not word:
            raise ValueError("no value")
        if word in _WORDS:
            return _WORDS[word]
        try:
            return json.loads(word, parse_constant=str)
        except (ValueError, RecursionError):
            return word

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match[0]

    def _skip(self) -> None:
        self._match(_SPACE)

    def _take(self, text: str) -> bool:
        taken = self._text.startswith(text, self._at)
        self._at += len(text) * taken
        return taken
