"""Compiling constraints: beside others, within bounds, and once for equal ones."""

from __future__ import annotations

import functools
import json
import queue
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import Matcher
from engine.structured.grammars import MAX_KEPT, MAX_STUCK, Grammars
from engine.types import Constraint, ErrorCode, RequestError, RequestInput, SamplingParams
from tests.e2e.harness import wait_until

SMALL = Constraint(kind="regex", text="[ab]+")
OTHERS = [Constraint(kind="regex", text=text) for text in ("[cd]+", "[ef]+")]


@pytest.fixture
def grammars(checkpoint: Path) -> Iterator[Grammars]:
    made = Grammars(str(checkpoint), 640, (0,))
    assert not isinstance(asked(made, SMALL).get(timeout=60), RequestError)
    yield made
    made.close()


def asked(grammars: Grammars, constraint: Constraint) -> queue.SimpleQueue[Matcher | RequestError]:
    made: queue.SimpleQueue[Matcher | RequestError] = queue.SimpleQueue()
    params = SamplingParams(structured_outputs=constraint)
    grammars.make(RequestInput(request_id="r", prompt_ids=[1], params=params), made.put)
    return made


def test_what_takes_too_long_is_refused_and_holds_nobody_up(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, released = grammars._made, threading.Event()

    def slow(input: RequestInput) -> Matcher:
        if input.params.structured_outputs in OTHERS:
            released.wait(60)
        return made(input)

    monkeypatch.setattr(grammars, "_made", slow)
    grammars._compile_s = 0.01
    late = [asked(grammars, constraint) for constraint in OTHERS]
    for answer in late:
        refusal = answer.get(timeout=60)
        assert isinstance(refusal, RequestError)
        assert "takes more than 0.01 s to compile" in refusal.message
    grammars._compile_s = 60
    assert not isinstance(asked(grammars, SMALL).get(timeout=60), RequestError)
    released.set()
    wait_until(lambda: not grammars._stuck, "no thread is late")
    assert late[0].empty(), "one answer a request"


def test_so_many_that_take_long_are_refused_at_once(grammars: Grammars) -> None:
    grammars._stuck = MAX_STUCK
    refusal = asked(grammars, SMALL).get(timeout=60)
    assert isinstance(refusal, RequestError)
    assert refusal.code is ErrorCode.UNAVAILABLE


def test_equal_constraints_are_compiled_once_and_few_are_kept(grammars: Grammars) -> None:
    first = grammars._kept[SMALL]
    one, other = (asked(grammars, SMALL).get(timeout=60) for _ in range(2))
    assert grammars._kept[SMALL] is first
    (letter,) = _letters(grammars, "a")
    assert not isinstance(one, RequestError)
    assert not isinstance(other, RequestError)
    one.advance(letter)
    assert [of.count for of in (one, other)] == [1, 0]  # type: ignore[attr-defined]
    for i in range(MAX_KEPT):
        asked(grammars, Constraint(kind="regex", text=f"a{{{i + 1}}}")).get(timeout=60)
    assert len(grammars._kept) == MAX_KEPT
    assert SMALL not in grammars._kept


def test_masks_are_of_the_tokens_that_may_follow(grammars: Grammars) -> None:
    matchers: Any = [asked(grammars, SMALL).get(timeout=60) for _ in range(3)]
    a, b = _letters(grammars, "ab")
    for _ in range(3):
        matchers[1].advance(a)
    masks = grammars.masks(matchers)
    allowed = [{v for v in range(640) if row[v // 32] >> v % 32 & 1} for row in masks.tolist()]
    assert {a, b} <= allowed[0] == allowed[2]
    assert allowed[1] == {0, *allowed[0]}, "the end of sequence, once it is an answer"


def explosive(i: int) -> str:
    """A pattern of 2^i states."""
    return f"^(.*[ab].{{{i}}}[cd].*)*$"


MANY: list[dict[str, Any]] = [{"type": "string", "pattern": explosive(i)} for i in range(30)]
NESTED: dict[str, Any] = functools.reduce(lambda inner, each: {**each, "anyOf": [inner, {"const": "x"}]}, MANY)


def chained(name: str, to: str) -> dict[str, Any]:
    """Each of MANY refers to the next. name, to: how it is named, and referred to."""
    parts = {str(i): {"$ref": to.format(i + 1), name: to.format(i).lstrip("#"), **each} for i, each in enumerate(MANY)}
    return {"$defs": parts | {"30": {name: to.format(30).lstrip("#")}}, "$ref": to.format(0)}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", {"allOf": MANY}),
        ("json", {"properties": {"a": {"allOf": [{"allOf": MANY[:3]}, {"allOf": MANY[3:6]}]}}}),
        ("json", {"allOf": [{"type": "object", "properties": {"a": each}} for each in MANY]}),
        ("json", {"allOf": [{"anyOf": [each, {"type": "string", "maxLength": 9}]} for each in MANY]}),
        (
            "json",
            {
                "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}", **each} for i, each in enumerate(MANY)} | {"30": {}},
                "$ref": "#/$defs/0",
            },
        ),
        ("json", NESTED),
        ("json", chained("$id", "http://example.com/{}")),
        ("json", chained("$anchor", "#p{}")),
        ("json", {"allOf": [{"items": [each]} for each in MANY], "type": "array", "minItems": 1}),
        ("json", {"type": "integer", "allOf": [{"multipleOf": 9999}, {"multipleOf": 9998}]}),
        ("json", {"multipleOf": 9999, "anyOf": [{"multipleOf": 9998}, {"const": 1}]}),
        ("json", {"allOf": [{"multipleOf": 9999}, {"multipleOf": 1e-20}]}),
        (
            "structural_tag",
            {
                "format": {
                    "type": "json_schema",
                    "style": "qwen_xml",
                    "json_schema": {"properties": {"a": {"type": "array", "items": {"allOf": MANY}}}},
                }
            },
        ),
        ("grammar", "start: A\nA: " + " & ".join(f"/(.*[ab].{{{i}}}[cd].*)*/" for i in range(30))),
        ("grammar", "start: A\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(15_000)) + '\nT15000: "x"'),
        ("grammar", "\n".join(f"{i or 'root'} ::= {i + 1}" for i in range(15_000)) + '\n15000 ::= "x"'),
        ("grammar", 'start: A # "\nA: ' + " & ".join(f"/(.*[ab].{{{i}}}[cd].*)*/" for i in range(30)) + ' # "'),
        ("grammar", 'start: "a" %json ' + json.dumps({"allOf": MANY})),
        ("structural_tag", {"format": {"type": "json_schema", "json_schema": {"allOf": MANY}}}),
    ],
)
def test_one_text_has_to_match_few_expressions(grammars: Grammars, kind: Any, text: Any) -> None:
    """Twelve of them took gigabytes, and their thread for good."""
    constraint = Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text))
    refusal = asked(grammars, constraint).get(timeout=60)
    assert isinstance(refusal, RequestError)
    assert "at most" in refusal.message
    assert grammars._stuck == 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", {"allOf": [{"properties": {f"p{i}": each}} for i, each in enumerate(MANY)], "type": "object"}),
        ("json", {"anyOf": MANY}),
        ("json", {"anyOf": [{"multipleOf": step} for step in (9999, 9998, 0.01)]}),
        (
            "json",
            {"multipleOf": 0.01, "allOf": [{"multipleOf": 0.5}, {"anyOf": [{"multipleOf": 4}, {"multipleOf": 7}]}]},
        ),
        ("json", {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 9}]}),
        ("grammar", 'start: A "&&&&&&" // & & & & &\nA: /[&]*&&&&/ & /.{1,9}/'),
        ("grammar", 'start: "a" %json {"type": "integer"} %json {"type": "null"}'),
    ],
)
def test_expressions_that_do_not_meet_may_be_many(grammars: Grammars, kind: Any, text: Any) -> None:
    constraint = Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text))
    made = asked(grammars, constraint).get(timeout=60)
    assert not isinstance(made, RequestError), made


def test_a_schema_within_a_grammar_is_held_as_any_other(grammars: Grammars) -> None:
    refusal = asked(grammars, Constraint(kind="grammar", text='start: %json {"const": 9007199254740993}')).get(
        timeout=60
    )
    assert isinstance(refusal, RequestError)
    assert "2^53" in refusal.message


AMBIGUOUS = Constraint(kind="grammar", text="start: s\ns: s s | /[a-z ]/\n")


@pytest.mark.parametrize("count", [1, 3])
def test_a_grammar_whose_masks_take_ever_longer_ends_its_answers_alone(grammars: Grammars, count: int) -> None:
    """400 tokens of it took minutes, of all requests in the engine."""
    hostile: Any = [asked(grammars, AMBIGUOUS).get(timeout=60) for _ in range(count)]
    hostile[0].allowance.left = 0.2  # seconds, of all of them
    healthy: Any = asked(grammars, SMALL).get(timeout=60)
    (a,) = _letters(grammars, "a")
    for _ in range(400):
        grammars.masks([*hostile, healthy])
        for matcher in (*hostile, healthy):
            matcher.advance(a)
        if all(matcher.error for matcher in hostile):
            break
    assert all("takes too long" in matcher.error for matcher in hostile)
    assert healthy.error is None
    again: Any = asked(grammars, AMBIGUOUS).get(timeout=60)
    grammars.masks([again])
    assert again.error is None, "another answer begins anew"


_WAYS = "\n".join(f"r{n}: /[a-z]{{1,{n % 9 + 1}}}/ /[a-z]{{0,{n % 7 + 1}}}/" for n in range(400))
_CHOICE = "(" + " | ".join(f"r{n}" for n in range(400)) + ")*\n" + _WAYS


@pytest.mark.parametrize(
    ("rules", "bound"),
    [
        ("a{0,40}\na: b{0,40}\nb: c{0,40}\nc: /[a-z]/", "more than 1,000 ways"),
        (
            "r0\n" + "\n".join(f"r{n}: r{n + 1} | r{n + 1} r{n + 1}" for n in range(60)) + "\nr60: /[a-z]/",
            "more than 1,000 ways",
        ),
        (_CHOICE, "more than 20,000 steps"),
    ],
)
def test_what_one_token_costs_is_bounded_however_the_grammar_jumps(grammars: Grammars, rules: str, bound: str) -> None:
    """The time of all tokens is no bound of one: half a second for its mask, and as much again to take it."""
    matcher: Any = asked(grammars, Constraint(kind="grammar", text=f'start: "x" inner\ninner: {rules}')).get(timeout=60)
    assert not isinstance(matcher, RequestError), "its beginning costs nothing"
    matcher.allowance.left = 1e9
    x, *rest = _letters(grammars, "x" + "abc" * 8)
    for letter in (x, *rest):
        grammars.masks([matcher])
        matcher.advance(letter)
    assert bound in matcher.error


def test_a_grammar_whose_states_are_used_up_is_compiled_afresh(grammars: Grammars) -> None:
    """What its answers share stayed at the limit, and each later one failed at its first token."""
    parts = ("[a-m].{25}[n-z ]", "[a-e ].{30}[t-z]", "[c-p].{35}[l-z]")
    constraint = Constraint(kind="regex", text="|".join(f"(.*{part}.*)*" for part in parts))
    letters = _letters(grammars, "abcdefghijklmnopqrstuvwxyz")
    chance = random.Random(1)
    for _ in range(2):
        matcher: Any = asked(grammars, constraint).get(timeout=60)
        grammars.masks([matcher])
        assert matcher.error is None
        while matcher.error is None and matcher.count < 2000:
            matcher.advance(chance.choice(letters))
            grammars.masks([matcher])
        assert "more than 50,000 states" in matcher.error


def test_tokens_that_the_model_has_no_logit_for_are_text(checkpoint: Path, tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one token more than a model of text alone has logits."""
    shutil.copytree(checkpoint, tmp_path / "c")
    file = tmp_path / "c" / "tokenizer.json"
    said = json.loads(file.read_text())
    said["added_tokens"].append({**said["added_tokens"][0], "id": 640, "content": "<picture>"})
    file.write_text(json.dumps(said))
    made = Grammars(str(tmp_path / "c"), 640, (0,))
    call = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {}}, "end": "<picture>"}
    tags = {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [call]}}
    matcher: Any = asked(made, Constraint(kind="structural_tag", text=json.dumps(tags))).get(timeout=60)
    made.close()
    assert not isinstance(matcher, RequestError), matcher.message


def test_a_folder_without_a_tokenizer_is_a_refusal(tmp_path: Path) -> None:
    made = Grammars(str(tmp_path), 640, (0,))
    refusal = asked(made, SMALL).get(timeout=60)
    made.close()
    assert isinstance(refusal, RequestError)
    assert "tokenizer.json" in refusal.message


def _letters(grammars: Grammars, text: str) -> list[int]:
    return [grammars._vocabulary._tokens.greedy_tokenize(letter)[0] for letter in text]
