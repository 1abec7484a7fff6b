"""Thinking and calls of one answer, told apart however its text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.openai.calls.forms import FORMS
from clients.openai.model_forms import ModelForms
from clients.openai.reader import reader_of
from clients.openai.reasoning import TAGS, Begins
from clients.openai.schema import ChatRequest
from clients.openai.tools import CallArguments, CallStart, ContentDelta, ReasoningDelta
from tests.clients.openai.test_call_forms import CUTS

PARAMETERS = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}
REQUEST = ChatRequest.model_validate(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
    }
)
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"n": 1}}',
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "pythonic": "[f(n=1)]",
    "mistral": '[TOOL_CALLS]f[ARGS]{"n": 1}',
    "deepseek-v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"n": 1}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"n": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "gemma4": "<|tool_call>call:f{n:1}<tool_call|>",
    "functiongemma": "<start_function_call>call:f{n:1}<end_function_call>",
}
CHANNELED = {"gpt-oss"}  # tests of its own: its channels hold the thinking


def read(forms: ModelForms, begins: Begins, text: str, sizes: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """(thinking, content, calls) of a text that comes in pieces of these sizes, over and over."""
    reader = reader_of(REQUEST, forms, begins, "")
    deltas, start, turn = [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        deltas += reader.feed(text[start : start + size])
        start, turn = start + size, turn + 1
    thinking, content = "", ""
    calls: list[tuple[str, str]] = []
    for delta in [*deltas, *reader.finish()]:
        match delta:
            case ReasoningDelta():
                thinking += delta.text
            case ContentDelta():
                content += delta.text
            case CallStart():
                calls.append((delta.name, ""))
            case CallArguments():
                calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.text)
    return thinking, content, calls


def test_every_form_is_here() -> None:
    assert set(WRITTEN) | CHANNELED == set(FORMS)


@pytest.mark.parametrize("tools", sorted(WRITTEN))
@pytest.mark.parametrize("tags", sorted(TAGS))
def test_a_thought_and_a_call_are_told_apart_at_every_cut(tools: str, tags: str) -> None:
    marks, forms = TAGS[tags], ModelForms(tools, tags)
    text = f"{marks.open}See {WRITTEN[tools]}.{marks.close}\n\n{WRITTEN[tools]}"
    for size in range(1, len(text) + 1):
        thinking, content, calls = read(forms, "before", text, [size])
        assert (thinking.strip(), content.strip(), calls) == (f"See {WRITTEN[tools]}.", "", [("f", '{"n": 1}')])


@settings(max_examples=40)
@pytest.mark.parametrize("tools", sorted(WRITTEN))
@given(data=st.data(), tags=st.sampled_from(sorted(TAGS)), begins=st.sampled_from(["before", "inside", "after"]))
def test_no_cut_changes_what_is_read(tools: str, data: st.DataObject, tags: str, begins: Begins) -> None:
    marks = TAGS[tags]
    parts = [marks.open, marks.close, WRITTEN[tools], WRITTEN[tools][:9], " ", "\n", "<", "[", "a", "{}"]
    text = data.draw(st.lists(st.sampled_from(parts), max_size=8).map("".join))
    forms, sizes = ModelForms(tools, tags), data.draw(CUTS)
    assert read(forms, begins, text, sizes) == read(forms, begins, text, [10_000])
