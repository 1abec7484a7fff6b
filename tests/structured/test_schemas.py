"""Schemas as grammars hold them: keywords are told from names of the client's, and data from schemas."""

from __future__ import annotations

from typing import Any

import pytest

from engine.structured.schemas import held

KEYWORDS = ["default", "enum", "const", "examples", "properties", "minimum", "uniqueItems"]


def of(name: str, schema: Any, among: str = "properties") -> dict[str, Any]:
    return {"type": "object", among: {name: schema}}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_property_with_the_name_of_a_keyword_is_held_as_any_other(name: str) -> None:
    bounds = {"type": "integer", "exclusiveMinimum": 3, "maximum": 2**62 + 3}
    assert held(of(name, bounds)) == of(name, {"type": "integer", "minimum": 4, "maximum": 2**62})
    assert held({"$ref": f"#/$defs/{name}", **of(name, bounds, "$defs")})["$defs"][name]["minimum"] == 4
    with pytest.raises(ValueError, match=r"exclusiveMinimum 5 with maximum 5\.5"):
        held(of(name, {"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}))
    with pytest.raises(ValueError, match="minProperties 3"):
        held(of(name, {"type": "object", "minProperties": 3}))


@pytest.mark.parametrize("keyword", ["const", "default"])
def test_values_are_no_schemas(keyword: str) -> None:
    data = {"minProperties": 3, "multipleOf": 10**9, "exclusiveMinimum": 5, "maximum": 5.5, "uniqueItems": False}
    assert held({keyword: data}) == {keyword: data}
    assert held({"enum": [data]}) == {"enum": [data]}


def test_integers_that_grammars_cannot_compare_are_refused_where_answers_may_hold_them() -> None:
    for schema in ({"const": 2**53 + 1}, {"enum": [{"const": [2**53 + 1]}]}, of("default", {"const": 2**53 + 1})):
        with pytest.raises(ValueError, match="integers beyond 2\\^53"):
            held(schema)
    assert held({"default": 2**53 + 1}) == {"default": 2**53 + 1}


def test_items_that_need_not_be_unique_are_any_items() -> None:
    assert held({"type": "array", "uniqueItems": False}) == {"type": "array"}
    assert held({"type": "array", "uniqueItems": True}) == {"type": "array", "uniqueItems": True}
    assert held(of("uniqueItems", False)) == of("uniqueItems", False)
