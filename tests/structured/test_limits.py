"""Limits of llguidance's: how many properties an object may leave out, and what is said where a grammar ends."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import Matcher
from engine.structured.grammars import Grammars
from engine.structured.limits import plain
from engine.types import Constraint, RequestError, RequestInput, SamplingParams


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Iterator[Grammars]:
    made = Grammars(str(checkpoint), 640, (0,))
    yield made
    made.close()


def compiled(grammars: Grammars, kind: Any, text: Any) -> Any:
    """The matcher, or the reason why there is none."""
    made: queue.SimpleQueue[Matcher | RequestError] = queue.SimpleQueue()
    constraint = Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text))
    params = SamplingParams(structured_outputs=constraint)
    grammars.make(RequestInput(request_id="r", prompt_ids=[1], params=params), made.put)
    return made.get(timeout=60)


def following(grammars: Grammars, matcher: Any, text: str) -> str | None:
    """What goes wrong with an answer that begins so."""
    for token in grammars._vocabulary._tokens.greedy_tokenize(text):
        grammars.masks([matcher])
        matcher.advance(token)
    grammars.masks([matcher])
    error: str | None = matcher.error
    return error


def parts(name: str, count: int) -> dict[str, Any]:
    return {f"{name}{i}": {"type": "integer"} for i in range(count)}


NEEDED: dict[str, Any] = {"r": {"type": "integer"}}


def alone(count: int) -> tuple[dict[str, Any], str]:
    return {"type": "object", "properties": parts("p", count)}, '{"p0":1,"p2":2}'


def before(count: int) -> tuple[dict[str, Any], str]:
    properties = {**parts("p", count), **NEEDED, **parts("q", count)}
    return {"type": "object", "properties": properties, "required": ["r"]}, '{"p1":1,"r":2,"q1":1}'


def behind(count: int) -> tuple[dict[str, Any], str]:
    return {"type": "object", "properties": {**NEEDED, **parts("p", count)}, "required": ["r"]}, '{"r":2,"p1":1}'


@pytest.mark.parametrize(("form", "limit"), [(alone, 248), (before, 333), (behind, 995)])
def test_so_many_properties_next_to_each_other_may_be_missing(grammars: Grammars, form: Any, limit: int) -> None:
    schema, answer = form(limit)
    for wrapped, text in ((schema, answer), ({"type": "array", "items": schema}, f"[{answer},{answer}]")):
        assert following(grammars, compiled(grammars, "json", wrapped), text) is None
    schema, _ = form(limit + 1)
    for wrapped in (schema, {"type": "object", "properties": {"a": schema}}):
        refusal = compiled(grammars, "json", wrapped)
        assert isinstance(refusal, RequestError)
        assert (
            f"properties: {limit + 1} next to each other may be missing, at most {limit} may there: name the first of "
            "them in `required`, or others between them" in refusal.message
        )


def test_required_properties_between_them_make_room_and_those_that_are_false_count_for_nothing(
    grammars: Grammars,
) -> None:
    names = parts("p", 2000)
    mixed = {"type": "object", "properties": names, "required": list(names)[::20]}
    assert not isinstance(compiled(grammars, "json", mixed), RequestError)
    never = {"type": "object", "properties": dict.fromkeys(names, False)}
    assert not isinstance(compiled(grammars, "json", never), RequestError)


def test_alternatives_whose_properties_are_too_many_together_are_refused_before_they_run(grammars: Grammars) -> None:
    ways = [{"type": "object", "properties": parts(name, 124)} for name in "ab"]
    refusal = compiled(grammars, "json", {"anyOf": ways})
    assert isinstance(refusal, RequestError)
    assert "cannot be used: more than 1,000 ways lead on behind one token" in refusal.message


def test_what_no_text_satisfies_behind_a_forced_beginning_is_refused_before_it_runs(grammars: Grammars) -> None:
    refusal = compiled(grammars, "grammar", 'start: "begin " T\nT: /x/ & /y/')
    assert isinstance(refusal, RequestError)
    assert "this grammar cannot be used: no text satisfies it, or a part of it" in refusal.message


def test_a_forced_beginning_may_be_long(grammars: Grammars) -> None:
    for kind, text, begun in (
        ("regex", "a{10000}", "a" * 50),
        ("grammar", 'start: "abcdefgh"{2000}', "abcdefgh" * 5),
        ("choice", ["x" * 10_000], "x" * 50),
    ):
        assert following(grammars, compiled(grammars, kind, text), begun) is None


def test_a_forced_beginning_past_a_limit_is_refused_before_it_runs(grammars: Grammars) -> None:
    refusal = compiled(grammars, "grammar", 'start: a{900}\na: b{900}\nb: "abcdefgh"')
    assert isinstance(refusal, RequestError)
    assert "cannot be used: what may follow takes more than 20,000 steps to tell: make it simpler" in refusal.message


def test_an_answer_that_comes_to_a_part_that_no_text_satisfies_ends_with_a_plain_sentence(grammars: Grammars) -> None:
    matcher = compiled(grammars, "grammar", 'start: "a" | "b" T\nT: /x/ & /y/')
    error = following(grammars, matcher, "b")
    assert error is not None
    assert error.startswith("structured_outputs: the answer cannot go on within its grammar: no text satisfies it, or")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ("NoExtensionBias\n<non-verbose/>", "no text satisfies it, or a part of it"),
        ("Parser Error: Current row has 1003 items; max is 1000", "more than 1,000 ways lead on behind one token"),
        ("parser error: Too many items (limit 20000; mask)", "what may follow takes more than 20,000 steps to tell"),
        ("lexer error: too many expressions constructed", "its expressions have more than 50,000 states"),
        ('Parser Error: token "z" doesn\'t satisfy the grammar; forced bytes', "it does not allow the token that came"),
        ("Unsatisfiable schema: Regex is empty: (And (Regex /a/))", "Unsatisfiable schema: no string satisfies all"),
        ("Unsatisfiable schema:\n  anyOf is empty", "Unsatisfiable schema: anyOf is empty"),
    ],
)
def test_what_llguidance_says_is_told_in_plain_words(told: str, sentence: str) -> None:
    assert plain(told).startswith(sentence)
