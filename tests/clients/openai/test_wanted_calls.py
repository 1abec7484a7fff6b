"""Calls that must come, in every form: what a model of random weights would write under the masks is read as calls
whose arguments fit their tools."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from clients.openai.calls.forms import FORMS
from clients.openai.calls.wanted import calls, calls_or_text
from clients.openai.constraints import chat_constraint
from clients.openai.errors import ApiError
from clients.openai.model_forms import ModelForms
from clients.openai.reader import reader_of
from clients.openai.schema import ChatRequest
from engine.structured.matcher import GrammarMatcher
from engine.types import Constraint
from tests.clients.openai.test_constraints import CITY, tools
from tests.clients.openai.test_tools import read
from tests.structured.marked import SPECIAL, Marked

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 6},
        "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
        "day": {"type": "string", "format": "date"},
        "count": {"type": "integer", "minimum": -3, "maximum": 12},
        "inner": {
            "type": "object",
            "properties": {"kind": {"enum": ["x", "y<", 5, None]}, "on": {"type": "boolean"}},
            "required": ["kind"],
            "additionalProperties": False,
        },
        "list": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 2},
        "numeral": {"enum": ["1", "b"]},
        "mixed": {"type": ["string", "null"], "maxLength": 3},
        "either": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"$ref": "#/$defs/short"}]},
        "referred": {"$ref": "#/$defs/short"},
    },
    "required": ["text", "count", "inner", "numeral"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "string", "minLength": 1, "maxLength": 3}},
}
MAP = {"type": "object", "additionalProperties": {"type": "integer"}}
TOOLS = tools(f=SCHEMA, g={"type": "object", "properties": {}, "additionalProperties": False}, h=MAP)
SCHEMAS = {tool.function.name: tool.function.parameters or {} for tool in TOOLS}
MARKED = {True: Marked(), False: Marked(SPECIAL[:2])}


def drawn(marked: Marked, constraint: Constraint, seed: int, most: int = 2000) -> str | None:
    """An answer of tokens that the masks allow, each as likely as the others; None where `most` end it."""
    rng = random.Random(seed)
    matcher = GrammarMatcher(marked.matcher(constraint), marked.special.eos, 0)
    tokens: list[int] = []
    while not matcher.ended and len(tokens) < most:
        assert matcher.inner is not None
        mask = matcher.inner.compute_bitmask()
        tokens.append(rng.choice([i for i in range(len(marked.bytes)) if mask[i // 8] >> i % 8 & 1]))
        matcher.advance(tokens[-1])
        assert matcher.error is None
    ended = [token for token in tokens if token not in marked.special.eos]
    return marked.decode(ended) if matcher.ended else None


def check(made: list[tuple[str, str]]) -> None:
    for name, arguments in made:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("special", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["special tokens", "text"])
@pytest.mark.parametrize("form", sorted(FORMS))
def test_an_answer_that_must_be_calls_is_read_as_calls_that_fit(form: str, special: bool) -> None:
    constraint = calls(TOOLS, form, 3)
    answers = [drawn(MARKED[special], constraint, seed) for seed in range(12)]
    whole = [answer for answer in answers if answer is not None]
    assert len(whole) > 6
    for answer in whole:
        content, made = read(FORMS[form].parser(TOOLS), answer, 7)
        assert (content.strip(), bool(made)) == ("", True), answer
        check(made)


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"gpt-oss"}))
def test_text_is_free_and_no_call_within_it_is_wrong(form: str) -> None:
    constraint = calls_or_text(TOOLS, form, None)
    assert drawn(MARKED[True], constraint, 0) is not None
    for seed in range(6):
        begun = FORMS[form].in_block(FORMS[form].trigger, "tool_calls") or FORMS[form].first
        matcher = MARKED[True].matcher(constraint)
        for token in MARKED[True].encode(f"I look. {begun}" if FORMS[form].trigger else begun):
            assert matcher.consume_token(token), matcher.get_error()
        rng = random.Random(seed)
        tokens: list[int] = []
        while not matcher.is_accepting() and len(tokens) < 1000:
            mask = matcher.compute_bitmask()
            tokens.append(rng.choice([i for i in range(len(MARKED[True].bytes)) if mask[i // 8] >> i % 8 & 1]))
            assert matcher.consume_token(tokens[-1])
        _, made = read(FORMS[form].parser(TOOLS), begun + MARKED[True].decode(tokens), 5)
        assert made or len(tokens) == 1000
        check(made if len(tokens) < 1000 else [])


def test_channels_hold_thoughts_and_then_a_call_or_an_answer() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
    said = "<|channel|>final<|message|>Rome."
    for marked in MARKED.values():
        must = calls(tools(f=CITY), "gpt-oss", 1)
        assert marked.accepts(must, call)
        assert marked.accepts(must, thought + thought + call)
        for text in ("", said, thought + said, thought, call.replace("Rome", "Bern"), call.replace("functions.f", "f")):
            assert not marked.accepts(must, text), text
        may = calls_or_text(tools(f=CITY), "gpt-oss", None)
        for text in (call, thought + call, said, thought + said):
            assert marked.accepts(may, text), text
        for text in (call.replace("Rome", "Bern"), said + "<|end|>" + call.replace("Rome", "Bern")):
            assert not marked.accepts(may, text), text


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("form", ["gpt-oss", "gemma4", "deepseek-v3.2", "qwen3-coder"])
def test_a_named_tool_is_called_behind_the_thinking(form: str) -> None:
    """Where a prompt cannot begin the call, the answer does."""
    given = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in "fg"]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": given, "tool_choice": NAMED}
    request = ChatRequest.model_validate(body)
    forms = ModelForms(form, "gpt-oss" if form == "gpt-oss" else "think")
    begins = forms.begins(request, "")
    constraint = chat_constraint(request, forms, begins)
    assert constraint is not None
    answers = [drawn(MARKED[True], constraint, seed) for seed in range(8)]
    for answer in answers:
        reader = reader_of(request, forms, begins, "<|start|>assistant" if form == "gpt-oss" else "")
        content, made = read(reader, answer or "", 9)
        assert answer is None or (content.strip(), [name for name, _ in made]) == ("", ["f"])
    assert any(answer is not None for answer in answers)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "object", "patternProperties": {"a": {}}}, "json_schema.patternProperties"),
        ({"type": "object", "properties": {"a": {"allOf": [{}, {}]}}}, "json_schema.allOf of several parts"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "uri"}}}, "json_schema.format 'uri'"),
        ({"type": "object", "required": ["a"]}, "json_schema.required names what properties does not"),
        ({"type": "object", "properties": {"a": {"$ref": "#/x"}}}, "json_schema.$ref '#/x'"),
        ({"type": "array"}, "json_schema.type"),
    ],
)
@pytest.mark.parametrize("form", ["gemma4", "deepseek-v3.2"])
def test_what_a_notation_has_no_rule_for_is_refused_by_name(form: str, schema: Any, sentence: str) -> None:
    with pytest.raises(Exception, match="cannot be read") as caught:
        MARKED[True].matcher(calls(tools(f=schema), form, 1))
    assert sentence in str(caught.value)


def test_schemas_that_are_too_large_together_are_refused() -> None:
    """It was a 500."""
    many = [{"a": {"type": "string", "description": "x" * 1000}, "n": {"const": n}} for n in range(300)]
    asked = tools(**{f"f{n}": {"type": "object", "properties": each} for n, each in enumerate(many)})
    for wanted in (lambda: calls(asked, "hermes", 1), lambda: calls_or_text(asked, "hermes", None)):
        with pytest.raises(ApiError, match="too large together") as refused:
            wanted()
        assert refused.value.status == 400
