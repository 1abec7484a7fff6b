"""Tool calls come out of generated text the same way however the text is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.openai.calls.forms import FORMS
from clients.openai.tools import (
    CallArguments,
    CallStart,
    ContentDelta,
    ForcedParser,
    HermesParser,
    LlamaParser,
    ToolParser,
)


def read(parser: ToolParser, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]) of a text fed `size` characters at a time."""
    deltas = [d for start in range(0, len(text), size) for d in parser.feed(text[start : start + size])]
    deltas += parser.finish()
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        elif isinstance(delta, CallArguments):
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.text)
    return content, calls


HERMES = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ('I look.\n<tool_call>{"name":"f","arguments":{}}</tool_call>', "I look.", [("f", "{}")]),
    (
        '<tool_call>{"name":"f","arguments":{"s":"}<\\"/tool_call>"}}</tool_call>\n'
        '<tool_call>{"arguments":[1,{"x":2}],"name":"g"}</tool_call>',
        "",
        [("f", '{"s":"}<\\"/tool_call>"}'), ("g", '[1,{"x":2}]')],
    ),
    ('<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
    ('<tool_call>{"name":"f","id":"x","arguments":{"a":', "", [("f", '{"a":')]),
    ("<tool_call>\nno json</tool_call>", "<tool_call>\nno json</tool_call>", []),
    # brackets forgotten and brackets too many
    (
        '<tool_call>\n{"name":"f","arguments":{"a":1}\n</tool_call>\n<tool_call>{"name":"g"}</tool_call>',
        "",
        [("f", '{"a":1}'), ("g", "{}")],
    ),
    (
        '<tool_call>{"name":"f","arguments":{"a":[1}</tool_call><tool_call>{"name":"g"}</tool_call>',
        "",
        [("f", '{"a":[1}'), ("g", "{}")],
    ),
    ('<tool_call>{"name":"f","arguments":{"a":1}}}}\n</tool_call>Done.', "Done.", [("f", '{"a":1}')]),
    ('<tool_call>{"name":"f","arguments": }</tool_call>Done.', "Done.", [("f", "")]),
    # what is no call is the answer's text
    ('<tool_call>{"name":5}</tool_call>', '<tool_call>{"name":5}</tool_call>', []),
    ('<tool_call>{"name":"","arguments":{}}', '<tool_call>{"name":"","arguments":{}}', []),
    # a key that comes twice
    ('<tool_call>{"name":"f","name":"g","arguments":{},"parameters":{"a":1}}</tool_call>', "", [("f", "{}")]),
    ("a < b <tool", "a < b <tool", []),
    ("  two\n lines\n", "  two\n lines\n", []),
    ("", "", []),
]

LLAMA = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('{"name":"f","parameters":{"a":1}}; {"name":"g","parameters":{}}', "", [("f", '{"a":1}'), ("g", "{}")]),
    ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ('{"answer": 4} is it', '{"answer": 4} is it', []),
    ('{"name":"f","parameters":{}};\n', "", [("f", "{}")]),
    ('{"name":"f","parameters":{"a":1},,} and', ",} and", [("f", '{"a":1}')]),
    ("no call {", "no call {", []),
    ('{"name"', '{"name"', []),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes_form_is_read_in_pieces_of_every_size(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for size in range(1, len(text) + 2):
        assert read(HermesParser(), text, size) == (content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
def test_llama_form_is_read_in_pieces_of_every_size(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for size in range(1, len(text) + 2):
        assert read(LlamaParser(["f", "g"]), text, size) == (content, calls)


def test_arguments_are_passed_on_before_their_end_is_known() -> None:
    parser = HermesParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Par')
    deltas = parser.feed("is, the ci")
    assert deltas == [CallArguments(0, "is, the ci")]


def test_call_ids_are_unique() -> None:
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call>' * 3
    starts = [d for d in HermesParser().feed(text) if isinstance(d, CallStart)]
    assert len({d.call_id for d in starts}) == 3


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_a_forced_call_goes_on_where_its_beginning_ends(form: str) -> None:
    assert FORMS[form].prefix("f").endswith("{")
    for size in range(1, 20):
        parser = ForcedParser("f")
        assert read(parser, '"a": {"b": "}"}}}\n</tool_call> more', size) == ("", [("f", '{"a": {"b": "}"}}')])
        assert parser.calls_done == 1


def test_a_forced_call_that_never_ends_is_handed_over_as_it_is() -> None:
    assert read(ForcedParser("f"), '"a": "x', 3) == ("", [("f", '{"a": "x')])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(arguments=st.dictionaries(st.text(max_size=5), JSON, max_size=4), size=st.integers(1, 40), ascii=st.booleans())
def test_any_json_arguments_survive(arguments: dict[str, object], size: int, ascii: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    content, calls = read(HermesParser(), text, size)
    assert content == ""
    assert [name for name, _ in calls] == ["f"]
    assert json.loads(calls[0][1]) == arguments


PIECES = ["<tool_call>", "</tool_call>", '{"name":', '"f"', '"arguments":', '"a":', *'{}[],5"<; x\n']


@given(text=st.lists(st.sampled_from(PIECES), max_size=24).map("".join), size=st.integers(1, 60))
def test_no_text_breaks_the_parsers(text: str, size: int) -> None:
    assert read(HermesParser(), text, size) == read(HermesParser(), text, len(text) + 1)
    assert read(LlamaParser(["f"]), text, size) == read(LlamaParser(["f"]), text, len(text) + 1)
