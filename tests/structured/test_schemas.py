"""Schemas as grammars hold them: keywords are told from names of the client's, and data from schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.structured.schemas import held, written

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


@pytest.mark.parametrize(
    "idle",
    [
        {"then": {"minimum": 1}, "else": {}},
        {"if": {"minimum": 1}},
        {"minContains": 2, "maxContains": 3},
        {"not": False},
        {"propertyNames": True, "unevaluatedProperties": {}, "unevaluatedItems": True},
        {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    ],
)
def test_what_asks_for_nothing_is_left_out(idle: dict[str, Any]) -> None:
    assert held({"type": "integer", **idle}) == {"type": "integer"}
    for key in idle:
        assert held(of(key, {"type": "integer"}))["properties"].keys() == {key}


def test_a_keyword_with_another_beside_it_asks_for_something() -> None:
    whole = {"if": {"minimum": 1}, "then": {"maximum": 9}, "contains": {"type": "null"}, "maxContains": 1}
    assert held(whole) == whole


def test_a_count_may_be_written_as_a_float() -> None:
    assert held({"minItems": 2.0, "maxLength": 3.0, "maxItems": 2.5}) == {
        "minItems": 2,
        "maxLength": 3,
        "maxItems": 2.5,
    }
    with pytest.raises(ValueError, match="minProperties 3"):
        held({"type": "object", "minProperties": 3.0})


def test_a_bound_that_no_grammar_is_made_for_is_the_nearest() -> None:
    double = {"type": "number", "minimum": -1.7e308, "maximum": 2**64 - 1}
    assert held(double) == {"type": "number", "minimum": -(2**63) + 2048, "maximum": 2**63 - 2048}
    for wrong in ({"minimum": 1e19}, {"exclusiveMaximum": -1e19}):
        with pytest.raises(ValueError, match="beyond 2\\^63"):
            held(wrong)


def test_a_format_is_a_pattern_beside_one_that_is_there() -> None:
    assert held({"format": "email"}) == {"format": "email"}
    assert held({"format": "date"})["pattern"].startswith("^")
    both = held({"format": "date", "pattern": "^2"})
    assert both["pattern"] == "^2"
    assert "02-29" in both["allOf"][0]["pattern"]


def test_options_of_the_library_are_those_of_white_space() -> None:
    assert (
        json.loads(written({"x-guidance": {"whitespace_flexible": False}}))["x-guidance"]["whitespace_flexible"]
        is False
    )
    for wrong in ({"lenient": True}, {"coerce_one_of": True}, "lenient"):
        with pytest.raises(ValueError, match=r"x-guidance.* is not taken"):
            written({"x-guidance": wrong, "not": {}})
