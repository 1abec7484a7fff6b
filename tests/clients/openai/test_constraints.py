"""Calls of tools as structural tags, held to texts by llguidance's masks over bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients.openai.calls.wanted import calls, calls_or_text
from clients.openai.constraints import constraint_of
from clients.openai.errors import ApiError
from clients.openai.schema import ChatRequest, Tool
from engine.types import Constraint
from tests.structured.marked import Marked

BYTES = Marked(("<|eos|>", "<|call|>"))
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def tools(**schemas: Any) -> list[Tool]:
    made = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in schemas.items()]
    return [Tool.model_validate(each) for each in made]


def accepts(constraint: Constraint, text: str) -> bool:
    return BYTES.accepts(constraint, text)


def call(form: str, name: str, arguments: Any) -> str:
    if form == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_an_answer_that_must_be_calls_is_nothing_else(form: str) -> None:
    grammar = calls(tools(f=CITY, g=None), form, 2)
    between = "\n" if form == "hermes" else "; "
    one, other = call(form, "f", {"city": "Rome"}), call(form, "g", {"any": [1]})
    assert accepts(grammar, one)
    assert accepts(grammar, one + between + other)
    assert not accepts(grammar, one + between + other + between + one)
    assert not accepts(grammar, call(form, "f", {"city": "Bern"}))
    assert not accepts(grammar, "text")
    assert not accepts(grammar, "")


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_strict_tools_leave_text_free_and_no_call_wrong(form: str) -> None:
    grammar = calls_or_text(tools(f=CITY, g=None), form, None)
    between = "\n" if form == "hermes" else "; "
    one, other = call(form, "f", {"city": "Oslo"}), call(form, "g", {"any": [1]})
    for text in ("", "Hello.", "a\nb < c", "No {braces} needed", one, one + between + other):
        assert accepts(grammar, text), text
    for text in (call(form, "f", {"city": "Bern"}), call(form, "h", {}), one[:-1], one + between + one[:-2]):
        assert not accepts(grammar, text), text


def test_text_stands_beside_calls_in_hermes_form() -> None:
    grammar = calls_or_text(tools(f=CITY), "hermes", None)
    one = call("hermes", "f", {"city": "Rome"})
    assert accepts(grammar, f"I look.\n{one}\nAnd again <tool: {one} Done.")
    assert not accepts(grammar, "I look. <tool_call>")
    assert not accepts(grammar, "I look. <tool_call>\n{}\n</tool_call>")


def test_strict_tools_and_a_schema_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    content = Constraint(kind="json", text=json.dumps(schema), whitespace="")
    grammar = calls_or_text(tools(f=CITY), "hermes", content)
    assert accepts(grammar, '{"n":5}')
    assert accepts(grammar, call("hermes", "f", {"city": "Rome"}))
    for text in ("", "Hello.", '{"n": 5}', '{"m":5}', call("hermes", "f", {"city": "Bern"})):
        assert not accepts(grammar, text), text
    for form, other in (("llama3", content), ("hermes", Constraint(kind="regex", text="a+"))):
        with pytest.raises(ApiError, match="strict tools beside a format"):
            calls_or_text(tools(f=CITY), form, other)


def test_any_object_may_be_held_to_a_schema() -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    asked["response_format"] = {"type": "json_object", "schema": CITY}
    made = constraint_of(ChatRequest.model_validate(asked))
    assert made is not None
    assert accepts(made, '{"city": "Rome"}')
    assert not accepts(made, '{"city": "Bern"}')
