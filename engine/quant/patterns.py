"""Regular expressions of a checkpoint, by which modules are told: no more of them than takes no time to match."""

from __future__ import annotations

import re

from engine.models.reader import ConfigError

MAX_CHARACTERS = 1000
MAX_REPEATS = 4  # without an end; each multiplies the time by the length of a name
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\)[*+{]|[*+]|\{\d*,\}|.", re.S)


def check(where: str, pattern: str) -> None:
    """Raises ConfigError for what is no expression, or may take longer than its length times a name's."""
    if len(pattern) > MAX_CHARACTERS:
        raise ConfigError(
            f"{where}: a regular expression has {len(pattern)} characters; at most {MAX_CHARACTERS} are read"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression: {error}") from None
    parts = _PART.findall(pattern)
    if any(part[0] == ")" and len(part) > 1 for part in parts):
        raise ConfigError(f"{where}: {pattern!r} repeats a group, which may take for ever to match: write it without")
    repeats = sum(part in ("*", "+") or (part.startswith("{") and len(part) > 1) for part in parts)
    if repeats > MAX_REPEATS:
        raise ConfigError(f"{where}: {pattern!r} has {repeats} repeats without an end; at most {MAX_REPEATS} are read")
