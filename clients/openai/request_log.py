"""Requests as lines of JSON in a file, without what people wrote unless that is asked for."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from clients.openai.trace import Trace

log = logging.getLogger("nereid.openai")

_MAX_LINE = 64 << 10  # bytes of a request in one line
_MAX_PARSED = 4 << 20  # of a body that is looked into
_MAX_ITEMS = 256  # of its fields, and of its messages
# Strings that name something of the API; all others are somebody's words.
_NAMES = frozenset(
    {"model", "role", "type", "object", "tool_choice", "service_tier", "reasoning_effort", "truncation", "effort"}
)
_WORDS_LISTED = frozenset({"messages", "input"})


class RequestLog:
    """Appends to a file, which several workers may share. Past `max_bytes` it becomes FILE.1, in place of the one
    before.

    texts: requests as they came; without it each text is its length, and what holds texts is its kind.
    Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, texts: bool) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._texts = texts
        self._complained = False
        self._file = self._opened()

    def write(self, trace: Trace, method: str, path: str, status: int) -> None:
        """One line. A disk that takes nothing costs no request: the log says so once."""
        usage = trace.usage
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "id": trace.request_id,
            "caller": trace.caller,
            "method": method,
            "path": path,
            "status": status,
            "seconds": round(trace.seconds, 6),
            "first_token_seconds": None if trace.first_token_s is None else round(trace.first_token_s, 6),
            "model": trace.model,
            "prompt_tokens": usage.prompt_tokens if usage else 0,
            "generated_tokens": usage.completion_tokens if usage else 0,
            "request": shown(trace.body, self._texts),
        }
        try:
            self._append(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("the request log %s takes no line: %s", self._path, error.strerror)

    def close(self) -> None:
        os.close(self._file)

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _append(self, line: bytes) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)  # one worker moves the file
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(self._file).st_ino == os.stat(self._path).st_ino:
                if os.fstat(self._file).st_size + len(line) > self._max_bytes:
                    os.replace(self._path, f"{self._path}.1")
                else:
                    os.write(self._file, line)
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                    return
        # It was moved away, by this worker, another, or a program that rotates logs.
        os.close(self._file)
        self._file = self._opened()
        os.write(self._file, line)


def shown(body: bytes, texts: bool) -> Any:
    """A request's body for the log, within bounds."""
    if not body:
        return None
    if texts:
        return body[:_MAX_LINE].decode("utf-8", "replace")
    if len(body) > _MAX_PARSED:
        return f"<{len(body)} bytes>"
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return f"<{len(body)} bytes that are no JSON>"
    if not isinstance(fields, dict):
        return _kind(fields)
    return {_field(name): _redacted(name, value) for name, value in list(fields.items())[:_MAX_ITEMS]}


def _field(name: str) -> str:
    """Names of fields are the API's, and short."""
    return name if name.isidentifier() and len(name) <= 64 else f"<{len(name)} characters>"


def _redacted(name: str, value: Any) -> Any:
    if name in _WORDS_LISTED and isinstance(value, list):
        return [_message(item) for item in value[:_MAX_ITEMS]]
    if isinstance(value, str) and name in _NAMES:
        return value[:256]
    return _kind(value)


def _message(item: Any) -> Any:
    if not isinstance(item, dict):
        return _kind(item)
    kept = {name: item[name][:64] for name in ("role", "type") if isinstance(item.get(name), str)}
    return kept | {name: _kind(item[name]) for name in ("content", "tool_calls", "output") if name in item}


def _kind(value: Any) -> Any:
    """Numbers and flags as they are; of the rest what it is and how much of it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return f"<{len(value)} characters>"
    return f"<{len(value)} {'fields' if isinstance(value, dict) else 'items'}>"
