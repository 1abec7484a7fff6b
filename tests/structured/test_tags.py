"""Structural tags: what each format lets through, token by token, and the sentence for what it cannot have."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from engine.types import Constraint, RequestError
from tests.structured.marked import Marked

MARKED = Marked()
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": CITY}
TEXT = {"type": "any_text"}
ROME = '{"city":"Rome"}'
ONE, WRONG = f"<function=f>{ROME}</function>", '<function=f>{"city":"Bern"}</function>'


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(**more: Any) -> dict[str, Any]:
    return {
        "type": "triggered_tags",
        "triggers": ["<function="],
        "tags": [{"begin": "<function=f>", "content": SCHEMA, "end": "</function>"}],
        **more,
    }


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


CHANNELS = {
    "type": "triggered_tags",
    "triggers": ["<|channel|>analysis", "<|channel|>commentary to="],
    "tags": [
        tag("<|channel|>analysis<|message|>", TEXT, "<|end|>"),
        tag("<|channel|>commentary to=functions.f<|message|>", SCHEMA, "<|call|>"),
    ],
}
DSML = {
    "type": "dispatch",
    "rules": [["<｜DSML｜function_calls>", sequence(SCHEMA, const("</｜DSML｜function_calls>"))]],
}
MESSAGE = {"type": "token", "token": "<|message|>"}

# (format, texts that are answers, texts that are not)
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("const", const("a <|end|>b"), ["a <|end|>b"], ["a b", "a <|end|>", ""]),
    ("schema", SCHEMA, [ROME, '{ "city" : "Oslo" }'], ["{}", f"{ROME}x"]),
    ("regex", {"type": "regex", "pattern": "a/b[0-9]{2}"}, ["a/b12"], ["a/b1", "b"]),
    ("ebnf", {"type": "grammar", "grammar": 'root ::= "a" [b-c]+'}, ["abc"], ["a", "ad"]),
    ("lark", {"type": "grammar", "grammar": "start: /a+/ b\nb: /c/"}, ["aac"], ["aa"]),
    ("any text", TEXT, ["", "a <b>\né", "a<|start|>b<|end|>"], []),
    ("excludes", {**TEXT, "excludes": ["</s>", "<|end|>"]}, ["a</b>", "<|start|>x"], ["a</s>", "a<|end|>"]),
    ("sequence", sequence(const("a"), SCHEMA, const("b")), [f"a{ROME}b"], [f"a{ROME}"]),
    ("text first", sequence(TEXT, const("END"), const("!")), ["END!", "abcEN END!"], ["abc", "END!!", "END"]),
    ("text then tag", sequence(TEXT, tag("<a>", TEXT, "</a>"), TEXT), ["x<a>y</a>z<a>", "<a></a>"], ["x", "x<a>y"]),
    ("text, tag, text, const", sequence(TEXT, tag("<a>", TEXT, ""), const("!")), ["x<a>y!"], ["x!", "x<a>y!z"]),
    ("or", {"type": "or", "elements": [SCHEMA, const("no"), const("")]}, [ROME, "no", ""], ["yes", "nono"]),
    ("optional", sequence({"type": "optional", "content": const("a")}, const("b")), ["ab", "b"], ["aab"]),
    ("star", {"type": "star", "content": const("ab")}, ["", "ab", "abab"], ["a"]),
    ("plus", {"type": "plus", "content": SCHEMA}, [ROME, ROME * 3], [""]),
    ("repeat", {"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
    ("repeat, no bound", {"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaaa"], ["a"]),
    ("tag", tag("<r>", TEXT, "</r>"), ["<r></r>", "<r>a<r></r>"], ["<r>", "<r></r>x", "<r><|start|></r>"]),
    ("tag of two ends", tag("<r>", TEXT, ["</r>", "<|end|>"]), ["<r>a</r>", "<r>a<|end|>"], ["<r>a"]),
    ("tag without end", tag("<r>", TEXT, ""), ["<r>", "<r>a</r>"], ["a"]),
    ("tag of a schema", tag("<r>", SCHEMA, [""]), [f"<r>{ROME}"], ["<r>"]),
    ("tag of an expression", tag("<n>", {"type": "regex", "pattern": ".*"}, "</n>"), ["<n>5</n>"], ["<n>5</n>5"]),
    ("tokens", tag(MESSAGE, TEXT, {"type": "token", "token": "<|end|>"}), ["<|message|>a<|end|>"], ["a<|end|>"]),
    (
        "calls",
        calls(),
        ["", "a < b", f"a {ONE}b{ONE}", f"<|start|>{ONE}<|end|>"],
        [WRONG, "<function=", f"{ONE}<function=g"],
    ),
    ("a call first", calls(at_least_one=True), [ONE, f"{ONE} then {ONE}"], ["", f"a{ONE}"]),
    ("one call", calls(stop_after_first=True), ["", "a", f"a {ONE}"], [f"{ONE}b", ONE * 2]),
    ("one call alone", calls(at_least_one=True, stop_after_first=True), [ONE], ["", f"a{ONE}", ONE * 2]),
    ("calls, not all text", calls(excludes=["no"]), ["yes", f"n{ONE}o"], ["no", f"{ONE}no"]),
    ("calls in a tag", tag("<r>", calls(), "</r>"), ["<r>a</r>", f"<r>a{ONE}b</r>"], ["<r><function=g", f"<r>{ONE}"]),
    (
        "channels",
        CHANNELS,
        [
            "",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes analysis",
            f"<|channel|>commentary to=functions.f<|message|>{ROME}<|call|>",
            "<|channel|>commentary<|message|>hi<|end|><|channel|>anal",
        ],
        ["<|channel|>analysis<|end|>", "<|channel|>commentary to=g", "<|channel|><|channel|>analysis to"],
    ),
    (
        "a special token within a trigger",
        DSML,
        ["a < b", f"a <｜DSML｜function_calls>{ROME}</｜DSML｜function_calls>b"],
        ["<｜DSML｜x"],
    ),
    (
        "separated",
        {"type": "tags_with_separator", "separator": ",", "tags": [tag("<i>", SCHEMA, "</i>")]},
        ["", f"<i>{ROME}</i>", f"<i>{ROME}</i>,<i>{ROME}</i>"],
        [",", f"<i>{ROME}</i>,", f"<i>{ROME}</i><i>{ROME}</i>"],
    ),
    (
        "separated, one",
        {
            "type": "tags_with_separator",
            "separator": ",",
            "tags": [tag("<i>", TEXT, "</i>"), tag("<j>", TEXT, "</j>")],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<i></i>", "<j>a</j>"],
        ["", "<i></i>,<j></j>"],
    ),
    (
        "dispatch",
        {"type": "dispatch", "rules": [["<f>", SCHEMA]], "loop": False},
        ["a", f"a<f>{ROME}"],
        [f"<f>{ROME}b"],
    ),
    (
        "token dispatch",
        {"type": "token_dispatch", "rules": [["<|message|>", const("z")]], "exclude_tokens": ["<|end|>"]},
        ["a<|message|>zb<|message|>z<|start|>"],
        ["<|message|>a", "a<|end|>"],
    ),
    (
        "tags by tokens",
        {"type": "token_triggered_tags", "trigger_tokens": ["<|message|>"], "tags": [tag(MESSAGE, SCHEMA, "<|end|>")]},
        ["", f"a<|message|>{ROME}<|end|>b"],
        ["<|message|>x"],
    ),
    (
        "any tokens",
        sequence({"type": "any_tokens", "exclude_tokens": ["<|message|>"], "max_tokens": 2}, MESSAGE),
        ["<|message|>", "a<|end|><|message|>"],
        ["abc<|message|>", "<|eos|><|message|>"],
    ),
    (
        "any token but",
        {"type": "exclude_token", "exclude_tokens": ["<|end|>", 97]},
        ["b", "<|start|>"],
        ["a", "<|end|>"],
    ),
    (
        "an older name",
        {"type": "qwen_xml_parameter", "json_schema": CITY},
        ["<parameter=city>Rome</parameter>"],
        [ROME],
    ),
]


def made(given: dict[str, Any]) -> Constraint:
    return Constraint(kind="structural_tag", text=json.dumps(given))


@pytest.mark.parametrize(("given", "right", "wrong"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_format_lets_its_answers_through_and_no_other(
    given: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    constraint = made({"type": "structural_tag", "format": given})
    assert [text for text in right if not MARKED.accepts(constraint, text)] == []
    assert [text for text in wrong if MARKED.accepts(constraint, text)] == []


def test_the_older_form_is_triggered_tags() -> None:
    structures = [{"begin": "<function=f>", "schema": CITY, "end": "</function>"}]
    structures += [{"begin": "<function=g>", "schema": '{"type": "integer"}', "end": "</function>"}]
    constraint = made({"type": "structural_tag", "structures": structures, "triggers": ["<function="]})
    for text in ("", "Hello <b>", f"I call {ONE} and <function=g>5</function>."):
        assert MARKED.accepts(constraint, text)
    for text in (WRONG, "<function=g>x", "<function=h>"):
        assert not MARKED.accepts(constraint, text)


def test_a_tokenizer_without_special_tokens_has_them_as_text() -> None:
    marked = Marked(("<|eos|>", "<|call|>"))
    constraint = made({"format": CHANNELS})
    for text in ("x", f"<|channel|>commentary to=functions.f<|message|>{ROME}<|call|>"):
        assert marked.accepts(constraint, text)
    assert not marked.accepts(constraint, "<|channel|>analysis to")


def test_thinking_comes_before_a_structural_tag() -> None:
    constraint = Constraint(kind="structural_tag", text=json.dumps({"format": SCHEMA}), think="open")
    assert MARKED.accepts(constraint, f"so {{</think>\n{ROME}")
    assert not MARKED.accepts(constraint, ROME)


def xml(**value: Any) -> dict[str, Any]:
    """A tag with one argument, in the notation of Qwen's coder."""
    schema = {"type": "object", "properties": {"a": value}}
    return {"format": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}


DEEP: Any = const("a")
for _ in range(70):
    DEEP = {"type": "optional", "content": DEEP}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"format": {"type": "xml"}}, "Invalid value 'xml' - at `$.format.type`"),
        ({"format": calls(trigger=1)}, "unknown field `trigger` - at `$.format`"),
        ({"format": {"type": "tag", "begin": "a", "content": TEXT}}, "missing required field `end`"),
        ({"format": {**TEXT, "max_tokens": 5}}, "any_text.max_tokens cannot be held to"),
        ({"format": {"type": "regex", "pattern": "a\\"}}, "ends with half of an escape"),
        ({"format": {**SCHEMA, "any_order": True}}, "json_schema.any_order"),
        ({"format": {**SCHEMA, "style": "yaml"}}, "json_schema.style 'yaml' is unknown; styles are json, qwen_xml"),
        ({"format": calls(triggers=["<tool"])}, "tags[0].begin '<function=f>' begins with no trigger"),
        ({"format": calls(triggers=["<f", "<function="])}, "begins with several triggers"),
        ({"format": calls(triggers=["<function=", "<x"])}, "no tag begins with the trigger '<x'"),
        ({"format": {"type": "star", "content": TEXT}}, "star: any_text goes on without end"),
        ({"format": sequence(TEXT, SCHEMA)}, "sequence.elements[0]: any_text goes on without end"),
        ({"format": {"type": "dispatch", "rules": [["a", TEXT]]}}, "dispatch.rules[0]: any_text goes on without end"),
        (
            {"format": {"type": "repeat", "min": 2, "max": 1, "content": const("a")}},
            "repeat.max is 1, less than its min",
        ),
        ({"format": {"type": "repeat", "min": 0, "max": 10**6, "content": const("a")}}, "Expected `int` <= 1000"),
        ({"format": {"type": "token", "token": "<x>"}}, "token '<x>' is no special token"),
        ({"format": DEEP}, "nested more than 64 deep"),
        (
            {"format": {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": 999983}}},
            "multipleOf 999983",
        ),
        (
            xml(type="string", minLength=5, maxLength=3),
            "json_schema: no string satisfies its maxLength and minLength together",
        ),
        (
            xml(type="string", pattern="^a$", minLength=3),
            "json_schema: no string satisfies its minLength and pattern together",
        ),
        (
            xml(type="string", format="date", maxLength=3),
            "json_schema: no string satisfies its format and maxLength together",
        ),
        (xml(type="array", items={"$ref": "#"}), "json_schema.$ref '#': references go to #/$defs or #/definitions"),
        ({"structures": [], "triggers": ["a"]}, "Expected `array` of length >= 1 - at `$.structures`"),
        ({"triggers": ["a"]}, "missing required field `structures`"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_the_elements_name(given: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        MARKED.matcher(made(given))
    assert caught.value.message.startswith("structured_outputs: this structural_tag cannot be read: ")
    assert sentence in caught.value.message


FIRST_TAGS = """
import threading
from engine.structured import formats

together = threading.Barrier(4)

def read() -> None:
    together.wait()
    content = {"type": "or", "elements": [{"type": "any_text"}, {"type": "json_schema", "json_schema": {}}]}
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "optional", "content": content}, "end": "</a>"}
    formats.parsed({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [tag]}})

threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_tags_of_a_process_may_come_at_once() -> None:
    """msgspec 0.22 ends two processes of three by a signal where threads are the first to meet types such as these."""
    ended = [subprocess.run([sys.executable, "-c", FIRST_TAGS], check=False).returncode for _ in range(6)]
    assert ended == [0] * 6
