"""What a reference within a schema stands for."""

from __future__ import annotations

from typing import Any

import pytest

from engine.structured.references import References, objects

PART = {"title": "part"}
INNER: dict[str, Any] = {
    "$id": "inner/",
    "$defs": {"p": PART, "same": {"title": "inner"}},
    "items": {"$ref": "#/$defs/same"},
}
SCHEMA: dict[str, Any] = {
    "$id": "http://x/root",
    "$defs": {"a b/c": PART, "same": {"title": "root"}, "inner": INNER, "named": {"$anchor": "n", "title": "named"}},
    "prefixItems": [{"title": "first"}],
}


@pytest.mark.parametrize(
    ("reference", "titles"),
    [
        ("#/$defs/a%20b~1c", ["part"]),
        ("#/prefixItems/0", ["first"]),
        ("#n", ["named"]),
        ("root#n", ["named"]),
        ("http://x/inner/#/$defs/p", ["part"]),
        ("#/$defs/same", ["root"]),
        ("#/prefixItems/1", []),
        ("http://[", []),
        ("http://elsewhere/", []),
    ],
)
def test_it_goes_by_id_anchor_and_pointer(reference: str, titles: list[str]) -> None:
    part = {"$ref": reference}
    references = References({**SCHEMA, "items": part})
    assert [each["title"] for each in references.of(part)] == titles


def test_it_begins_at_the_part_that_it_stands_in() -> None:
    assert [each["title"] for each in References(SCHEMA).of(INNER["items"])] == ["inner"]
    assert References(SCHEMA).of(PART) == []


def test_objects_come_behind_those_around_them() -> None:
    assert [each.get("title") for each in objects([{"title": 1, "a": [{"title": 2}]}, 3])] == [1, 2]
