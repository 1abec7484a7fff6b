"""Formats of strings as expressions, where llguidance's own let through what is none or leave out what is one."""

from __future__ import annotations

import re

# Years from 0001: calendars of programs have no year 0.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    "02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_FRACTION = "(?:\\.[0-9]+)?"
# A leap second ends a day of UTC, so that it stands at other hours elsewhere: here in UTC alone.
TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])|"
    f"23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_PART = "[0-9a-fA-F]{1,4}"
_LAST = f"(?:{_PART}:{_PART}|{IPV4})"
# RFC 4291, by how many parts stand behind the colons that leave zeros out.
_SHORTENED = (
    f"::(?:{_PART}:){{5}}{_LAST}",
    *(f"(?:(?:{_PART}:){{0,{4 - count}}}{_PART})?::(?:{_PART}:){{{count}}}{_LAST}" for count in (4, 3, 2, 1, 0)),
    f"(?:(?:{_PART}:){{0,5}}{_PART})?::{_PART}",
    f"(?:(?:{_PART}:){{0,6}}{_PART})?::",
)
IPV6 = f"(?:(?:{_PART}:){{6}}{_LAST}|{'|'.join(_SHORTENED)})"

EXACT = {"date": DATE, "time": TIME, "date-time": f"{DATE}[tT]{TIME}", "ipv6": IPV6}
# What begins and ends a set, a range from U+0000 on, a class of Unicode, another escape.
_SETS = re.compile(
    r"(?P<opened>\[(?P<negated>\^?)(?P<first>[\]-]?))|(?P<closed>\])|(?P<nul>(?:\\x00|\\x\{0+\}|\\u0000|\\u\{0+\}|\x00)-(?!\]))|"
    r"(?P<named>\\[pP](?:\{[^}]*\}|.))|\\.",
    re.DOTALL,
)


def without_nul(pattern: str) -> str:
    """An expression whose sets hold no U+0000, where they may hold all control characters: in one of all that only
    `\\u` can write, llguidance lets a quote and a backslash through, though the set may exclude them."""
    depth = 0

    def changed(found: re.Match[str]) -> str:
        nonlocal depth
        if found["opened"]:
            depth += 1
            if found["negated"]:
                return "[^\\x00" + (f"\\{found['first']}" if found["first"] else "")
        elif found["closed"]:
            depth = max(0, depth - 1)
        elif found["nul"] and depth:
            return "\\x01-"
        elif found["named"]:
            return f"[{found['named']}&&[^\\x00]]"
        return found[0]

    return _SETS.sub(changed, pattern)
