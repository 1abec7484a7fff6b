"""Calls whose arguments are no JSON text, and gpt-oss's channels, as the published templates write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

from clients.openai.calls.forms import FORMS
from clients.openai.calls.harmony import HarmonyReader
from clients.openai.tools import ContentDelta, Delta, ReasoningDelta
from tests.clients.openai.test_call_forms import CUTS, TOOLS, cut
from tests.clients.openai.test_tools import read

# An assistant's calls as google/gemma-4-31B-it, google/functiongemma-270m-it, deepseek-ai/DeepSeek-V3.2 and
# deepseek-ai/DeepSeek-V4-Flash have them in a conversation.
GEMMA = (
    "{%- macro value(v) %}{% if v is string %}Q{{ v }}Q{% elif v is boolean %}{{ v | lower }}"
    "{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v | dictsort %}{{ k }}:{{ value(w) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for w in v %}{{ value(w) }}{{ '' if loop.last else ',' }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{{ text }}{% for name, arguments in calls %}OPENcall:{{ name }}{{ value(arguments) }}CLOSE{% endfor %}"
)
DSML = (
    '{{ text }}\n\n<｜DSML｜BLOCK>{% for name, arguments in calls %}\n<｜DSML｜invoke name="{{ name }}">\n'
    '{% for k, v in arguments.items() %}<｜DSML｜parameter name="{{ k }}" string='
    '"{{ (v is string) | lower }}">'
    "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>{% endfor %}"
    "\n</｜DSML｜BLOCK>"
)
TEMPLATES = [
    ("gemma4", GEMMA, {"OPEN": "<|tool_call>", "CLOSE": "<tool_call|>", "Q": '<|"|>'}),
    ("functiongemma", GEMMA, {"OPEN": "<start_function_call>", "CLOSE": "<end_function_call>", "Q": "<escape>"}),
    ("deepseek-v3.2", DSML, {"BLOCK": "function_calls"}),
    ("deepseek-v3.2", DSML, {"BLOCK": "tool_calls"}),
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(-1e9, 1e9)
    | st.text("ab {}[]:,\"'\\é\n", max_size=6)
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


def written(source: str, words: dict[str, str], **variables: Any) -> str:
    environment = Environment(autoescape=False, keep_trailing_newline=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    for word, stands_for in words.items():
        source = source.replace(word, stands_for)
    return environment.from_string(source).render(**variables)


@pytest.mark.parametrize(("form", "source", "words"), TEMPLATES, ids=["gemma4", "functiongemma", "v3.2", "v4"])
@given(
    text=st.sampled_from(["", "I look.", "a < b [x]"]),
    made=st.lists(st.tuples(st.sampled_from("fg"), st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3),
    sizes=CUTS,
)
def test_what_a_template_writes_is_read_and_written_again(
    form: str, source: str, words: dict[str, str], text: str, made: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    whole = written(source, words, text=text, calls=made)
    content, calls = cut(FORMS[form].parser(TOOLS), whole, sizes)
    found = [(name, json.loads(arguments)) for name, arguments in calls]
    assert (content, found) == (text, made)
    assert written(source, words, text=content, calls=found) == whole


CASES = [
    (
        "gemma4",
        '<|tool_call>call:f{s:<|"|>San Jose, "CA"<|"|>,n:5,l:[<|"|>a<|"|>,1.5],'
        'o:{k:true,<|"|>x y<|"|>:null}}<tool_call|>',
        "",
        [("f", {"s": 'San Jose, "CA"', "n": 5, "l": ["a", 1.5], "o": {"k": True, "x y": None}})],
    ),
    ("gemma4", 'Now.<|tool_call>call:g{}<tool_call|><|tool_call>call:f{s:"a",n: x }<tool_call|>', "Now.", None),
    ("gemma4", '<|tool_call>call:f{s:<|"|>cut off', '<|tool_call>call:f{s:<|"|>cut off', []),
    ("gemma4", "<|tool_call>no call<tool_call|>", "<|tool_call>no call<tool_call|>", []),
    (
        "gemma4",
        "<|tool_call>call:f{" + "a:{" * 200 + "<tool_call|>",
        "<|tool_call>call:f{" + "a:{" * 200 + "<tool_call|>",
        [],
    ),
    (
        "deepseek-v3.2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n',
        "",
        [("f", {"s": "5", "n": 5})],
    ),
    (
        "deepseek-v3.2",
        "a <｜DSML｜function_calls>x</｜DSML｜function_calls>",
        "a<｜DSML｜function_calls>x</｜DSML｜function_calls>",
        [],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "made"), CASES)
def test_examples_are_read_in_pieces_of_every_size(
    form: str, text: str, content: str, made: list[tuple[str, dict[str, Any]]] | None
) -> None:
    made = [("g", {}), ("f", {"s": "a", "n": "x"})] if made is None else made
    for size in [*range(1, min(len(text), 100)), len(text) + 1]:
        said, calls = read(FORMS[form].parser(TOOLS), text, size)
        assert (said, [(name, json.loads(arguments)) for name, arguments in calls]) == (content, made)


# What openai/gpt-oss-20b writes; its template shows the same turns later with the recipient before the channel.
ANSWER = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is 7.<|return|>"
)
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>'
SHOWN = ' to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
MADE = [("f", '{"n": 1}')]
CHANNELS: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    ("<|start|>assistant", ANSWER, "Let me see.", "It is 7.", []),
    ("<|start|>assistant", CALL, "", "", MADE),
    ("<|start|>assistant", SHOWN, "", "", MADE),
    ("<|start|>assistant", THOUGHT + PREAMBLE + CALL, "Let me see.", "I look.", MADE),
    (
        "<|start|>assistant",
        CALL + "<|start|>assistant" + CALL.replace("functions.f", "g"),
        "",
        "",
        [*MADE, ("g", '{"n": 1}')],
    ),
    ("<|start|>assistant", CALL + THOUGHT, "Let me see.", "", MADE),
    ("<|start|>assistant", "<|channel|>commentary to=functions.g<|message|><|call|>", "", "", [("g", "{}")]),
    ("<|start|>assistant", '<|channel|>commentary to=functions.f<|message|>{"n', "", "", [("f", '{"n')]),
    ("<|start|>assistant", "<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", "", []),
    ("<|start|>assistant", "<|channel|>analysis<|message|>cut o", "cut o", "", []),
    ("<|start|>assistant", "<|channel|>fin", "", "", []),
    ("<|start|>assistant", "no channels <b>", "", "no channels <b>", []),
    ("<|start|>assistant<|channel|>final<|message|>It", " is 7.<|return|>", "", " is 7.", []),
    ("the end of a long text", " goes on", "", " goes on", []),
]


def channels(prompt: str, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning: list[str] = []

    class Reader(HarmonyReader):
        def feed(self, text: str) -> list[Delta]:
            return self._kept(super().feed(text))

        def finish(self) -> list[Delta]:
            return self._kept(super().finish())

        @staticmethod
        def _kept(deltas: list[Delta]) -> list[Delta]:
            reasoning.extend(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
            return [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]

    content, calls = read(Reader(["f", "g"], prompt), text, size)
    return "".join(reasoning), content, calls


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content", "made"), CHANNELS)
def test_channels_are_told_apart_in_pieces_of_every_size(
    prompt: str, text: str, reasoning: str, content: str, made: list[tuple[str, str]]
) -> None:
    for size in range(1, len(text) + 2):
        assert channels(prompt, text, size) == (reasoning, content, made)


def test_without_tools_a_call_is_no_call() -> None:
    deltas = HarmonyReader([], "<|start|>assistant").feed(CALL)
    assert not [delta for delta in deltas if not isinstance(delta, ContentDelta | ReasoningDelta)]


WORDS = [
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|start|>",
    "assistant",
    "analysis",
    "final",
    "commentary",
]


@given(text=st.lists(st.sampled_from([*WORDS, " to=functions.f", *"{}<| a"]), max_size=16).map("".join), sizes=CUTS)
def test_no_text_and_no_cut_changes_what_is_read_of_channels(text: str, sizes: list[int]) -> None:
    def whole(pieces: list[int]) -> list[tuple[str, str]]:
        reader, found, start, turn = HarmonyReader(["f"], "<|start|>assistant"), [], 0, 0
        while start < len(text):
            found += reader.feed(text[start : start + pieces[turn % len(pieces)]])
            start, turn = start + pieces[turn % len(pieces)], turn + 1
        joined: list[tuple[str, str]] = []
        for delta in [*found, *reader.finish()]:
            kind, said = type(delta).__name__, getattr(delta, "text", "")
            if joined and joined[-1][0] == kind and kind != "CallStart":
                said = joined.pop()[1] + said
            joined.append((kind, said))
        return joined

    assert whole(sizes) == whole([10_000])
