"""A sample of `make test-schemas`: masks keep answers to their schemas, and mask no token of a valid document."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.schemas.__main__ import demo_checker, table
from tests.schemas.check import Checker, Found, keyword
from tests.schemas.generate import random_schema
from tests.schemas.shipped import shipped


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return demo_checker(tmp_path_factory.mktemp("schemas") / "demo")


def test_random_schemas_hold_in_both_directions(checker: Checker) -> None:
    found = Found()
    for seed in range(10_000, 10_120):
        rng = Random(seed)
        checker.check(f"seed {seed}", random_schema(rng), rng, found)
    assert (found.wrong, found.masked, dict(found.broken)) == ([], [], {})
    assert found.answers - found.cut > 150
    assert found.documents > 200
    assert sum(found.refused.values()) < 30
    assert table(found, Found()).count("\n") > 9


def test_so_do_schemas_of_installed_packages(checker: Checker) -> None:
    found = Found()
    for name, schema in shipped(every=500):
        checker.check(name, schema, Random(name), found, answers=1, documents=1)
    assert (found.wrong, found.masked) == ([], [])
    assert found.schemas > 5


BOUNDS = [
    {"type": "integer", "exclusiveMaximum": 2**53 + 1, "minimum": 2**53 - 2},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "exclusiveMinimum": -1.5, "exclusiveMaximum": 1},
    {"type": "number", "maximum": 2**53 + 3, "minimum": 2**53 + 1},
    {"type": "object", "minProperties": 2, "required": ["a"], "additionalProperties": {"type": "null"}},
]


@pytest.mark.parametrize("schema", BOUNDS)
def test_bounds_hold_where_floats_end(checker: Checker, schema: object) -> None:
    found = Found()
    checker.check("bounds", schema, Random(1), found, answers=20, documents=10)
    assert (found.wrong, found.masked, found.refused, found.answers) == ([], [], {}, 20)


OPEN: dict[str, Any] = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        ({"type": "string", "maxLength": 2}, '"\\u00e9\\ud83d\\ude00"', True),
        ({"type": "string"}, '"\\ud83d"', False),
        ({}, '{"\\u0061": ["\\u00e9"]}', True),
        (OPEN, '{"a": 1, "b": "\\u001b\\u00e9"}', True),
        (OPEN, '{"a": 1, "\\u0061": "x"}', False),
        ({"properties": {"a": OPEN}}, '{"\\u0061": 2}', False),
        ({"allOf": [OPEN, {"required": ["b"]}]}, '{"a": 1, "b": 2, "c": 3}', True),
        ({"allOf": [OPEN, {"required": ["b"]}]}, '{"a": 1, "b": 2, "\\u0061": []}', False),
        ({**OPEN, "additionalProperties": True, "allOf": [{"type": "object"}]}, '{"a": 1, "b": 2}', True),
        (
            {"additionalProperties": False, "allOf": [{"type": "object"}], "patternProperties": {"^x": {}}},
            '{"xy": 1}',
            True,
        ),
        ({"allOf": [{"properties": {"b": {}}}], **OPEN}, '{"b": 1, "a": 2}', True),
        (
            {
                "oneOf": [{"properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("x", "y")],
                "type": "object",
            },
            '{"k": "y"}',
            True,
        ),
        ({**OPEN, "minProperties": 2, "additionalProperties": False}, '{"a": 1}', False),
    ],
)
def test_escapes_are_allowed_where_they_make_no_listed_name(
    checker: Checker, schema: object, text: str, allowed: bool
) -> None:
    assert (checker.masked(schema, text) is None) == allowed


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum, exclusiveMaximum"),
        ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, "exclusiveMinimum, exclusiveMaximum"),
        ({"type": "object", "minProperties": 2}, "minProperties, maxProperties"),
        ({"not": {}}, "not"),
        ({"type": "string", "format": "idn-email"}, "format idn-email"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern, look-around"),
        ({"$ref": "https://example.com/a.json"}, "$ref to another document"),
    ],
)
def test_what_grammars_get_wrong_is_refused_by_its_keyword(checker: Checker, schema: object, named: str) -> None:
    found = Found()
    checker.check("refused", schema, Random(1), found)
    assert list(found.refused) == [named]
    assert keyword("something else") == "something else"
