"""Constraints under everyone's names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.serving.frontend.sampling_fields import build
from engine.types import MAX_CONSTRAINT_BYTES, Constraint, RequestError, SamplingParams

SCHEMA = {"type": "object"}
JSON = Constraint(kind="json", text='{"type": "object"}')
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
FORMAT = {"type": "structural_tag", "format": {"type": "any_text"}}
OLDER, NEWER = (Constraint(kind="structural_tag", text=json.dumps(each)) for each in (TAGS, FORMAT))
TYPED = json.dumps({"type": "structural_tag", **TAGS})


def made(**fields: Any) -> Constraint | None:
    return build(fields).structured_outputs


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": '{"type": "object"}'}, JSON),
        ({"json_schema": SCHEMA}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": '{"json": {"type": "object"}}'}, JSON),
        ({"structured_outputs": {"json_object": True}}, JSON),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            msgspec.structs.replace(JSON, whitespace=""),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            msgspec.structs.replace(JSON, whitespace=" ?"),
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, msgspec.structs.replace(JSON, whitespace=" ?")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "backend": "auto"}}, JSON),
        ({"structured_outputs": {"json": SCHEMA, "think": "may"}}, msgspec.structs.replace(JSON, think="may")),
        ({"structured_outputs": msgspec.to_builtins(JSON)}, JSON),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, msgspec.structs.replace(JSON, whitespace="")),
        ({"guided_decoding": {"json": SCHEMA}, "guided_decoding_backend": "xgrammar"}, JSON),
        ({"response_format": {"type": "json_object"}}, JSON),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            msgspec.structs.replace(JSON, text='{"type": "array"}'),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JSON,
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"guided_json": None, "guided_choice": None, "guided_regex": None}, None),
        (
            {"structured_outputs": {"regex": "a+", "disable_any_whitespace": False, "disable_fallback": True}},
            Constraint(kind="regex", text="a+"),
        ),
        ({"guided_regex": "a+"}, Constraint(kind="regex", text="a+")),
        ({"regex": "a+"}, Constraint(kind="regex", text="a+")),
        ({"guided_choice": ["a", "é"]}, Constraint(kind="choice", text='["a", "é"]')),
        ({"guided_choice": '["a", "é"]'}, Constraint(kind="choice", text='["a", "é"]')),
        ({"guided_grammar": "start: /a/"}, Constraint(kind="grammar", text="start: /a/")),
        ({"ebnf": 'root ::= "a"'}, Constraint(kind="grammar", text='root ::= "a"')),
        ({"guided_decoding_guide_type": ["json"]}, JSON),
        ({"guided_decoding_guide_type": ["json_schema"], "guided_decoding_guide": ['{"type": "object"}']}, JSON),
        (
            {"guided_decoding_guide_type": ["regex"], "guided_decoding_guide": ["a+"]},
            Constraint(kind="regex", text="a+"),
        ),
        ({"guided_decoding_guide_type": [], "guided_decoding_guide": []}, None),
        ({"response_format": {"type": "structural_tag", **TAGS}}, msgspec.structs.replace(OLDER, text=TYPED)),
        ({"structured_outputs": {"structural_tag": TAGS}}, OLDER),
        ({"structured_outputs": json.dumps({"structural_tag": json.dumps(TAGS)})}, OLDER),
        ({"guided_decoding": {"structural_tag": FORMAT}}, NEWER),
        ({"structural_tag": json.dumps(FORMAT)}, NEWER),
        ({"guided_decoding_guide_type": ["structural_tag"], "guided_decoding_guide": [json.dumps(FORMAT)]}, NEWER),
    ],
)
def test_everyones_names(fields: dict[str, Any], expected: Constraint | None) -> None:
    assert build({"max_tokens": 3, **fields}) == SamplingParams(max_tokens=3, structured_outputs=expected)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json and guided_regex both say what the answer must be"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "must hold exactly one of json, json_object, regex"),
        ({"structured_outputs": {}}, "must hold exactly one of"),
        ({"structured_outputs": {"jsom": {}}}, "unknown key 'jsom'"),
        ({"structured_outputs": "json"}, "structured_outputs is not JSON"),
        ({"structured_outputs": [1]}, "structured_outputs must be a JSON object"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag must be a JSON object with `format`, or with"),
        ({"structural_tag": "{"}, "structural_tag is not JSON"),
        (
            {"response_format": {"type": "structural_tag", "structures": []}},
            "response_format must be a JSON object with",
        ),
        ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, "not implemented"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": "false"}},
            "structured_outputs.disable_any_whitespace must be true or false",
        ),
        ({"structured_outputs": {"json": SCHEMA, "disable_fallback": 0}}, "disable_fallback must be true or false"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "it goes with a schema"),
        ({"structured_outputs": {"kind": "xml", "text": ""}}, "structured_outputs: Invalid enum value"),
        ({"guided_whitespace_pattern": " "}, "it goes with a schema"),
        ({"guided_regex": 7}, "guided_regex must be a string"),
        ({"guided_choice": "a"}, "guided_choice is not JSON"),
        ({"guided_choice": [1]}, "guided_choice must be a list of strings"),
        ({"guided_choice": []}, "guided_choice is an empty list, which no answer is one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is an empty list"),
        ({"guided_regex": ""}, "guided_regex must be a string, and not an empty one; leave it out"),
        ({"ebnf": ""}, "ebnf must be a string, and not an empty one"),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": ""}, "guided_decoding_guide is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be"),
        ({"guided_json": SCHEMA, "beam_width": 2, "temperature": 0}, "structured_outputs cannot be combined with beam"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is missing"),
        ({"guided_decoding_guide": ["a"]}, "needs guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": ["regex"]}, "guided_decoding_guide is missing"),
        ({"guided_decoding_guide_type": ["xml"], "guided_decoding_guide": ["a"]}, "must be json, json_schema, regex"),
        ({"guided_regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "may hold 262144 bytes at most"),
    ],
)
def test_refusals_say_what_is_wrong(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        made(**fields)
    assert sentence in caught.value.message


@pytest.mark.parametrize("word", ["null", "none", "None"])
def test_an_expression_may_be_a_word_that_elsewhere_stands_for_nothing(word: str) -> None:
    expression = Constraint(kind="regex", text=word)
    for fields in (
        {"guided_regex": word},
        {"regex": word},
        {"structured_outputs": {"regex": word}},
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": word},
    ):
        assert made(**fields) == expression
    assert made(ebnf=word) == Constraint(kind="grammar", text=word)


@pytest.mark.parametrize("word", ["null", "none", "None", ""])
def test_where_a_request_parameter_cannot_be_null_its_text_asks_for_nothing(word: str) -> None:
    for name in ("guided_json", "guided_choice", "structured_outputs", "response_format", "guided_decoding_guide_type"):
        assert made(**{name: word}) is None
