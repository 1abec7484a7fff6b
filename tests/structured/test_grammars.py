"""Compiling constraints: beside others, within bounds, and once for equal ones."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import Matcher
from engine.structured.grammars import MAX_KEPT, MAX_STUCK, Grammars
from engine.types import Constraint, ErrorCode, RequestError, RequestInput, SamplingParams

SMALL = Constraint(kind="regex", text="[ab]+")
# 0.1 s and more; nothing of it is kept from one to the next
LARGE = [Constraint(kind="json", text=json.dumps({"type": "integer", "multipleOf": step})) for step in (9973, 9967)]


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


def test_what_takes_too_long_is_refused_and_holds_nobody_up(grammars: Grammars) -> None:
    grammars._compile_s = 0.01
    late = [asked(grammars, constraint) for constraint in LARGE]
    for answer in late:
        refusal = answer.get(timeout=60)
        assert isinstance(refusal, RequestError)
        assert "takes more than 0.01 s to compile" in refusal.message
    grammars._compile_s = 60
    assert not isinstance(asked(grammars, SMALL).get(timeout=60), RequestError)
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


def test_a_folder_without_a_tokenizer_is_a_refusal(tmp_path: Path) -> None:
    made = Grammars(str(tmp_path), 640, (0,))
    refusal = asked(made, SMALL).get(timeout=60)
    made.close()
    assert isinstance(refusal, RequestError)
    assert "tokenizer.json" in refusal.message


def _letters(grammars: Grammars, text: str) -> list[int]:
    return [grammars._vocabulary._tokens.greedy_tokenize(letter)[0] for letter in text]
