"""Each form of calls is read however its text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

from clients.openai.calls.forms import FORMS
from clients.openai.calls.wanted import calls, calls_or_text
from clients.openai.constraints import chat_constraint
from clients.openai.errors import ApiError
from clients.openai.model_forms import ModelForms
from clients.openai.schema import ChatRequest, Tool
from clients.openai.tools import ForcedParser, ToolParser
from tests.clients.openai.test_constraints import CITY, accepts, tools
from tests.clients.openai.test_tools import JSON, read

TEXT = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}}
TOOLS: list[Tool] = tools(f=TEXT, g=None)

# The calls of an assistant's turn in the forms of deepseek-ai/DeepSeek-V3 and DeepSeek-V3.1,
# moonshotai/Kimi-K2-Instruct and mistralai/Mistral-Small-3.2-24B-Instruct-2506; CASES have those of
# Qwen/Qwen3-Coder-30B-A3B-Instruct and meta-llama/Llama-4-Scout-17B-16E-Instruct. They are as other servers' parsers
# read them, not the published templates.
TEMPLATES = {
    "deepseek-v3": "{{ text }}<｜tool▁calls▁begin｜>{% for name, arguments in calls %}{{ '' if loop.first else '\n' }}"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n{{ arguments }}\n```<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek-v3.1": "{{ text }}<｜tool▁calls▁begin｜>{% for name, arguments in calls %}<｜tool▁call▁begin｜>{{ name }}"
    "<｜tool▁sep｜>{{ arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi-k2": "{{ text }}<|tool_calls_section_begin|>{% for name, arguments in calls %}<|tool_call_begin|>"
    "functions.{{ name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>",
    "mistral": "{{ text }}{% for name, arguments in calls %}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}{% endfor %}",
}
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)
CUTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def cut(parser: ToolParser, text: str, sizes: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """As `read`, in pieces of these sizes, over and over."""
    pieces, start = [], 0
    while start < len(text):
        pieces.append(text[start : start + sizes[len(pieces) % len(sizes)]])
        start += len(pieces[-1])

    class Cut:
        calls_done = 0

        def feed(self, _: str) -> list[Any]:
            return [delta for piece in pieces for delta in parser.feed(piece)]

        finish = staticmethod(parser.finish)

    return read(Cut(), text or " ", max(1, len(text)))


def written(form: str, text: str, made: list[tuple[str, str]]) -> str:
    environment = Environment(autoescape=False, keep_trailing_newline=True)
    return environment.from_string(TEMPLATES[form]).render(text=text, calls=made)


@pytest.mark.parametrize("form", TEMPLATES)
@given(
    text=st.sampled_from(["", "I look.", "a < b [x]"]),
    made=st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS.map(json.dumps)), min_size=1, max_size=3),
    sizes=CUTS,
)
def test_what_a_template_writes_is_read_and_written_again(
    form: str, text: str, made: list[tuple[str, str]], sizes: list[int]
) -> None:
    whole = written(form, text, made)
    assert cut(FORMS[form].parser(TOOLS), whole, sizes) == (text, made)
    assert written(form, *cut(FORMS[form].parser(TOOLS), whole, sizes)) == whole


# (form, text, content, calls)
CASES = [
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}, "id": "123456789"}]', "", [("f", '{"n": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": [1]}}]',
        "",
        [("f", "{}"), ("g", '{"a": [1]}')],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"n": 1}', "", [("f", '{"n": 1}')]),
    ("mistral", 'Now.\n[TOOL_CALLS]f{"n": 1}', "Now.", [("f", '{"n": 1}')]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("mistral", "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
    ("kimi-k2", "<|tool_calls_section_begin|>?<|tool_calls_section_end|>!", None, []),
    (
        "kimi-k2",
        '<|tool_calls_section_begin|> <|tool_call_begin|> functions.f:0 <|tool_call_argument_begin|> {"n": 1} '
        "<|tool_call_end|> <|tool_calls_section_end|>",
        "",
        [("f", '{"n": 1}')],
    ),
    (
        "deepseek-v3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x',
        "",
        [("f", '{"s": "x')],
    ),
    (
        "qwen3-coder",
        "I look.\n<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
        '<parameter=l>\n["a"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>',
        "I look.",
        [("f", '{"s": "5", "n": 5, "l": ["a"]}'), ("g", "{}")],
    ),
    ("qwen3-coder", "a <tool_call>x</tool_call>", "a<tool_call>x</tool_call>", []),
    ("pythonic", '[f(s="a\\"b", n=-1), g(x=[True, null], y={"k": 1.5})]', "", None),
    ("pythonic", "<|python_start|>[f(n=1)]<|python_end|>", "", [("f", '{"n": 1}')]),
    ("pythonic", "[other(n=1)]", "[other(n=1)]", []),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "Hello [f(n=1)]", "Hello [f(n=1)]", []),
    ("pythonic", "[" * 5000, "[" * 5000, []),
]


@pytest.mark.parametrize(("form", "text", "content", "made"), CASES)
def test_examples_are_read_in_pieces_of_every_size(
    form: str, text: str, content: str | None, made: list[tuple[str, str]] | None
) -> None:
    if made is None:
        made = [("f", '{"s": "a\\"b", "n": -1}'), ("g", '{"x": [true, null], "y": {"k": 1.5}}')]
    for size in [*range(1, min(len(text), 150)), len(text) + 1]:
        assert read(FORMS[form].parser(TOOLS), text, size) == (text if content is None else content, made)


MARKERS = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]
MARKERS += ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
MARKERS += ["<|tool_call_argument_begin|>", "[TOOL_CALLS]", "[ARGS]", "functions.f:0", "```json\n", "<tool_call>"]
MARKERS += ["</tool_call>", "<function=f>", "<parameter=s>", "</parameter>", "</function>", '{"n":1}', "[f(n=1)]"]


@pytest.mark.parametrize("form", sorted(FORMS))
@given(text=st.lists(st.sampled_from([*MARKERS, *'{}[],5"<; f\n']), max_size=16).map("".join), sizes=CUTS)
def test_no_text_and_no_cut_changes_what_is_read(form: str, text: str, sizes: list[int]) -> None:
    assert cut(FORMS[form].parser(TOOLS), text, sizes) == cut(FORMS[form].parser(TOOLS), text, [10_000])


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_grammar_holds_calls_to_the_form_and_the_schema(form: str) -> None:
    right, wrong = ('{"city": "Rome"}', '{"city": "Bern"}')
    two = [("f", right), ("g", '{"a": 1}')]
    grammar = calls(tools(f=CITY, g=None), form, 2)
    assert accepts(grammar, written(form, "", two))
    for text in ("", "text", written(form, "", [("f", wrong)]), written(form, "", [*two, two[0]])):
        assert not accepts(grammar, text), text
    free = calls_or_text(tools(f=CITY, g=None), form, None)
    for text in ("", "Hello <b>.", written(form, "", two), written(form, "I look.", two)):
        assert accepts(free, text), text
    assert not accepts(free, written(form, "I look.", [("f", wrong)]))


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_named_call_is_begun_as_the_template_begins_it(form: str) -> None:
    prefix = FORMS[form].prefix("f")
    whole = written(form, "", [("f", '{"n": 1}')])
    assert whole.startswith(prefix)
    assert read(ForcedParser("f"), whole[len(prefix) :], 3) == ("", [("f", '{"n": 1}')])


def request(**fields: Any) -> ChatRequest:
    made = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    strict = made.pop("strict", None)
    function = {"name": "f", "parameters": CITY} | ({"strict": strict} if strict else {})
    return ChatRequest.model_validate(made | {"tools": [{"type": "function", "function": function}]})


NAMED = {"type": "function", "function": {"name": "f"}}


def test_only_names_of_python_can_be_called_in_its_form() -> None:
    wanted = tools(**{"get-time": None})
    for made in (lambda: calls(wanted, "pythonic", 1), lambda: calls_or_text(wanted, "pythonic", None)):
        with pytest.raises(ApiError, match="'get-time' is no name in Python"):
            made()
    for fields in ({"tool_choice": NAMED}, {"tool_choice": "required"}, {"strict": True}):
        assert chat_constraint(request(**fields), ModelForms(tools="pythonic"), "before") is not None
    assert chat_constraint(request(), ModelForms(tools="pythonic"), "before") is None
