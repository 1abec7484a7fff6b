"""Schemas that refer to themselves: with an end, and without."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine.structured import endless
from engine.structured.schemas import held


def object_of(inner: Any, *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inner}, "required": list(required), **more}


ROOT = {"$ref": "#"}
PART = {"$ref": "#/$defs/p"}


@pytest.mark.parametrize(
    "schema",
    [
        ROOT,
        object_of(ROOT, "a"),
        object_of(object_of(ROOT, "a"), "a"),
        {"allOf": [object_of(ROOT, "a")]},
        {"anyOf": [object_of(ROOT, "a"), ROOT]},
        {"type": "array", "items": ROOT, "minItems": 1},
        {"$defs": {"p": {"$ref": "#/$defs/q"}, "q": PART}, "type": "array", "items": PART},
        object_of({"$ref": "#node"}, "a", **{"$anchor": "node"}),
        object_of(PART, **{"$defs": {"p": object_of(PART, "a")}}),
    ],
)
def test_what_leads_to_itself_without_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^\$ref '#.*' leads to itself without end, so nothing satisfies it$"):
        held(schema)


@pytest.mark.parametrize(
    "schema",
    [
        object_of(ROOT),
        object_of({"anyOf": [ROOT, {"type": "null"}]}, "a"),
        object_of({"type": "array", "items": ROOT}, "a"),
        {"oneOf": [object_of(ROOT, "a"), {"type": "integer"}]},
        {"properties": {"a": ROOT}, "required": ["a"]},
        {"$defs": {"p": object_of(PART, "a")}, "type": "string"},
        {"const": ROOT},
        {"properties": {"$ref": {"type": "string"}}},
        {"type": ["object", "null"], "properties": {"a": ROOT}, "required": ["a"]},
    ],
)
def test_what_may_end_is_taken(schema: dict[str, Any]) -> None:
    assert held(schema) == schema


def test_a_long_chain_takes_the_time_of_its_length() -> None:
    parts = {f"p{i}": {"$ref": f"#/$defs/p{i + 1}"} for i in range(8000)}
    began = time.process_time()
    endless.check({"$defs": {**parts, "p8000": {"type": "null"}}, "$ref": "#/$defs/p0"})
    assert time.process_time() - began < 5
