"""Names in a schema that are no keywords: nearly one, or an annotation."""

from __future__ import annotations

from typing import Any

import pytest

from engine.structured.lark_rules import Rules, SpecialTokens
from engine.structured.notations import arguments
from engine.structured.schemas import held


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("minlength", "minLength"),
        ("max_items", "maxItems"),
        ("exclusive-minimum", "exclusiveMinimum"),
        ("require", "required"),
        ("requierd", "required"),
        ("propeties", "properties"),
        ("patterns", "pattern"),
        ("additional_properties", "additionalProperties"),
        ("item", "items"),
        ("enums", "enum"),
        ("Type", "type"),
        ("anyof", "anyOf"),
    ],
)
def test_a_name_that_is_nearly_a_keyword_is_refused_with_the_keyword(name: str, meant: str) -> None:
    sentence = f"^{name} is no keyword of JSON schemas: write {meant}, or give an annotation another name$"
    for schema in (
        {name: 3},
        {"properties": {"a": {name: 3}}},
        {"items": [{"anyOf": [{name: 3}]}]},
        {"$defs": {"a": {name: 3}}},
    ):
        with pytest.raises(ValueError, match=sentence):
            held(schema)


@pytest.mark.parametrize(
    "name",
    [
        *("title", "description", "$comment", "readOnly", "deprecated", "contentEncoding", "discriminator"),
        *("x-order", "x-require", "propertyOrdering", "enumNames", "tsType", "errorMessage", "markdownDescription"),
        *("cost", "note", "formal", "optional", "unit", "nullable", "example", ""),
    ],
)
def test_any_other_name_is_an_annotation(name: str) -> None:
    schema = {"type": "string", name: "u"}
    assert held(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"require": {"type": "string"}}, "required": ["require"]},
        {"$defs": {"types": {"type": "string"}}},
        {"const": {"minlength": 3}},
        {"enum": [{"minlength": 3}]},
        {"default": {"minlength": 3}, "examples": [{"item": 1}]},
        {"x-form": {"require": True}},
    ],
)
def test_names_of_a_client_and_data_are_no_keywords(schema: dict[str, Any]) -> None:
    assert held(schema) == schema


@pytest.mark.parametrize("style", ["qwen_xml", "gemma", "python"])
def test_arguments_in_every_notation_are_looked_through(style: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxlength": 3}}}
    with pytest.raises(ValueError, match="maxlength is no keyword of JSON schemas: write maxLength"):
        arguments(schema, style, Rules(SpecialTokens({}, frozenset())))
