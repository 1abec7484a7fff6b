"""Which documents schemas let through, as they are usually written, and which they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.types import Constraint
from tests.structured.marked import Marked


@pytest.fixture(scope="module")
def marked() -> Marked:
    return Marked()


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "number", "multipleOf": 0.07}, ["0.07", "0.7", "7", "-0.21", "0.70"], ["0.2", "0.071", "1"]),
        ({"type": "number", "multipleOf": 0.01, "minimum": 0}, ["0.5", "1.05", "3", "2.50"], ["0.005", "-1"]),
        ({"type": ["number", "string"], "multipleOf": 0.25}, ["0.5", "0.75", '"0.1"'], ["0.1", "null"]),
        ({"multipleOf": 0.25}, ["0.50", "1", "[0.1]", '"x"'], ["0.1"]),
        (
            {"allOf": [{"type": "number", "multipleOf": 0.25}, {"multipleOf": 0.1}]},
            ["0.5", "1.5", "2"],
            ["0.25", "0.1"],
        ),
        ({"type": "integer", "multipleOf": 0.5}, ["3", "0"], ["0.5"]),
        ({"type": "number", "minimum": 0.9171763132459553}, ["1", "0.9171763132459555"], ["0.9171763132459552"]),
        ({"const": 0.1 + 0.2}, ["0.30000000000000004"], ["0.3"]),
    ],
)
def test_numbers(marked: Marked, schema: Any, taken: list[str], refused: list[str]) -> None:
    constraint = Constraint(kind="json", text=json.dumps(schema))
    assert [text for text in taken if not marked.accepts(constraint, text)] == []
    assert [text for text in refused if marked.accepts(constraint, text)] == []


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        ('^a[^"]b$', [r"a\\b", "axb", r"a\nb"], [r"a\"b"]),
        (r"^[^\\]*$", [r"a\"\t", ""], [r"a\\"]),
        (r'^[^"\\]+$', ["é x", r"\n"], [r"\"", r"\\", ""]),
        (r"^[\x00-!]$", [r"\t", "!", r"\u0001"], [r"\"", r"\\"]),
        (r"^\P{P}$", ["a", "+", r"\n"], [r"\"", r"\\", "!"]),
        (r"^\p{Letter}+$", ["éa"], ["1"]),
        (r'^[^-"]$', ["x", "]"], ["-", r"\""]),
        (r"^\[[^\n]$", ["[x", "[^"], [r"[\n", "x"]),
    ],
)
def test_quotes_and_backslashes_that_a_set_excludes(
    marked: Marked, pattern: str, taken: list[str], refused: list[str]
) -> None:
    constraint = Constraint(kind="json", text=json.dumps({"type": "string", "pattern": pattern}))
    assert [text for text in taken if not marked.accepts(constraint, f'"{text}"')] == []
    assert [text for text in refused if marked.accepts(constraint, f'"{text}"')] == []


_INTEGER, _STRING = {"type": "integer"}, {"type": "string"}
_TREE = {"type": "object", "properties": {"a": _INTEGER}, "additionalProperties": {"$ref": "#/$defs/t"}}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (
            {"properties": {"a": _INTEGER, "ab": _INTEGER}, "additionalProperties": _STRING},
            [r'{"a":1,"ab":2,"b":"x"}', '{"abc":"x"}', '{"":"x"}', '{"é":"x"}'],
            [r'{"\u0061":"x"}', r'{"a\u0062":"x"}', '{"ab":"x"}', '{"b":1}'],
        ),
        (
            {"properties": {'é"\n': _INTEGER}, "additionalProperties": _STRING},
            [r'{"é\"\n":1}', r'{"é\"b\n":"x"}', r'{"b\n":"x"}'],
            [r'{"é\"\u000a":"x"}', r'{"é\u0022\n":"x"}', r'{"\u00e9\"\n":"x"}'],
        ),
        ({"properties": {"a\n": _INTEGER}}, [r'{"a\n":1,"b":[]}'], [r'{"a\u000a":"x"}', r'{"a\u000A":"x"}']),
        (
            {"required": ["b"], "additionalProperties": _STRING},
            ['{"b":"x","c":"y"}'],
            [r'{"b":"x","\u0062":1}', '{"c":"y"}', '{"b":1}'],
        ),
        ({"$defs": {"t": _TREE}, "$ref": "#/$defs/t"}, ['{"a":1,"b":{"c":{}}}'], [r'{"\u0061":{}}', '{"b":{"a":{}}}']),
        (
            {"properties": {"x": {"maxProperties": 1, "type": "object"}, "a": _INTEGER}},
            ['{"x":{"b":1},"a":1}'],
            [r'{"\u0061":"x"}'],
        ),
        (
            {"properties": {"a": _INTEGER, "b": {"$ref": "#/additionalProperties"}}, "additionalProperties": _STRING},
            ['{"b":"x","c":"y"}'],
            ['{"b":1}'],
        ),
        ({"properties": {"x" * 60: _INTEGER}, "additionalProperties": _STRING}, ['{"y":"x"}'], ['{"y":1}']),
    ],
)
def test_names_that_are_not_listed(marked: Marked, schema: Any, taken: list[str], refused: list[str]) -> None:
    constraint = Constraint(kind="json", text=json.dumps({"type": "object", **schema}))
    assert [text for text in taken if not marked.accepts(constraint, text)] == []
    assert [text for text in refused if marked.accepts(constraint, text)] == []


@pytest.mark.parametrize("count", [2_000, 20_000])
def test_choices_may_be_many(marked: Marked, count: int) -> None:
    choices = [f"{number:x} é" for number in range(count)]
    for constraint in (
        Constraint(kind="choice", text=json.dumps(choices, ensure_ascii=False)),
        Constraint(kind="regex", text="|".join(choices)),
    ):
        assert marked.accepts(constraint, choices[-1])
        assert not marked.accepts(constraint, f"{count:x} é")
    constraint = Constraint(kind="json", text=json.dumps({"enum": choices}, ensure_ascii=False))
    assert marked.accepts(constraint, json.dumps(choices[-1], ensure_ascii=False))


def test_a_choice_may_begin_another(marked: Marked) -> None:
    constraint = Constraint(kind="choice", text=json.dumps(["a", "ab", "abcd"]))
    assert [text for text in ("a", "ab", "abc", "abcd", "") if marked.accepts(constraint, text)] == ["a", "ab", "abcd"]
