"""Formats as expressions, against Python's own readers of dates and addresses."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Callable
from random import Random

import pytest

from engine.structured.string_formats import EXACT, without_nul


def reads(reader: Callable[[str], object], text: str) -> bool:
    try:
        reader(text)
    except ValueError:
        return False
    return True


def test_a_date_is_a_day_of_the_calendar() -> None:
    date = re.compile(EXACT["date"])
    for year in (*range(0, 10_000, 7), 4, 100, 400, 1900, 2000, 2024, 2100):
        for day in ("02-28", "02-29", "02-30", "04-30", "04-31", "12-31", "12-32", "00-10", "13-01", "01-00"):
            text = f"{year:04}-{day}"
            assert bool(date.fullmatch(text)) == reads(datetime.date.fromisoformat, text), text


def test_an_address_is_any_way_to_write_one() -> None:
    address, rng = re.compile(EXACT["ipv6"]), Random(1)
    parts = ("a", "12", "FFFF", ":", ":", ":", "::", "1.2.3.4", "0")
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 17))) for _ in range(10_000)]
    held = [bool(address.fullmatch(text)) for text in texts]
    assert held == [reads(ipaddress.IPv6Address, text) for text in texts]
    assert sum(held) > 300


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("23:59:59Z", True),
        ("00:00:00.125-08:00", True),
        ("23:59:60.5Z", True),
        ("22:59:60Z", False),
        ("24:00:00Z", False),
        ("10:00:00", False),
    ],
)
def test_a_leap_second_ends_a_day(text: str, held: bool) -> None:
    assert bool(re.fullmatch(EXACT["time"], text)) == held
    assert bool(re.fullmatch(EXACT["date-time"], f"2016-12-31T{text}")) == held


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ('^[^"]*$', r'^[^\x00"]*$'),
        (r"\[^[^\n]", r"\[^[^\x00\n]"),
        ("[^-a][^]b]", r"[^\x00\-a][^\x00\]b]"),
        ("[a^]", "[a^]"),
        (r"[\x00-!]\x00-", r"[\x01-!]\x00-"),
        (r"\P{P}[^\pL]", r"[\P{P}&&[^\x00]][^\x00[\pL&&[^\x00]]]"),
    ],
)
def test_a_set_of_control_characters_holds_no_nul(pattern: str, written: str) -> None:
    assert without_nul(pattern) == written
