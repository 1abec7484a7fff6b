"""An engine under constraints: every answer is what it must be, however it was scheduled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.api import Engine, Generation
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.text import Tokenizer
from engine.types import Constraint, FinishReason, RequestInput, SamplingParams
from tests.structured.schemas import ROOTED, SCHEMAS

PEOPLE = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def engine_of(folder: Path, blocks: int = 400, **runtime: Any) -> Engine:
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=8, token_budget=64),
        cache=CacheConfig(num_blocks=blocks),
        runtime=RuntimeConfig(device="cpu", **runtime),
    )
    return Engine.from_config(config).start()


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    made = engine_of(checkpoint)
    yield made
    made.check_integrity()
    made.close()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


def request(name: str, kind: Any, text: Any, output: list[int] | None = None, **params: Any) -> RequestInput:
    made = Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text), whitespace="")
    settings = {"max_tokens": 300, "seed": 7, "structured_outputs": made, **params}
    return RequestInput(
        request_id=name, prompt_ids=list(range(40, 60)), params=SamplingParams(**settings), output_ids=output or []
    )


def run(engine: Engine, *requests: RequestInput) -> list[Generation]:
    return engine.generate(list(requests))


def whole(generation: Generation, tokenizer: Tokenizer) -> str:
    assert generation.finish_reason is FinishReason.STOP, generation
    return tokenizer.decode(generation.token_ids)


@given(schema=st.one_of(SCHEMAS, ROOTED), seed=st.integers(0, 2**30))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_valid(engine: Engine, tokenizer: Tokenizer, schema: Any, seed: int) -> None:
    (got,) = run(engine, request("r", "json", schema, seed=seed))
    if got.finish_reason is FinishReason.LENGTH:
        return
    jsonschema.validate(json.loads(whole(got, tokenizer)), schema)


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", "(ab|c){3}-\\d{2}", "(ab|c){3}-\\d{2}"),
        ("choice", ["yes", "no", "日本"], "yes|no|日本"),
        ("grammar", 'start: "x" y\ny: "1" | "22"', "x(1|22)"),
        ("grammar", 'root ::= "<" [a-c] ">"', "<[abc]>"),
    ],
)
def test_each_kind_holds(engine: Engine, tokenizer: Tokenizer, kind: str, text: Any, pattern: str) -> None:
    got = run(engine, *(request(str(seed), kind, text, seed=seed) for seed in range(6)))
    assert all(re.fullmatch(pattern, whole(one, tokenizer)) for one in got)


def test_it_works_with_everything_else_that_changes_a_draw(engine: Engine, tokenizer: Tokenizer) -> None:
    more: list[dict[str, Any]] = [
        {"logprobs": 3, "prompt_logprobs": 1},
        {"min_tokens": 250},
        {"ignore_eos": True},
        {"logit_bias": dict.fromkeys(range(100, 200), 50.0)},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"bad_words": ("Ann",)},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.5},
        {"stop_token_ids": (600,)},
    ]
    got = run(engine, *(request(str(i), "json", PEOPLE, **params) for i, params in enumerate(more)))
    for one in got:
        jsonschema.validate(json.loads(whole(one, tokenizer)), PEOPLE)
    assert len(got[0].logprobs) == len(got[0].token_ids)
    assert got[0].prompt_logprobs is not None


def test_min_tokens_keeps_an_answer_going_that_may(engine: Engine) -> None:
    (got,) = run(engine, request("r", "regex", "(a|b)*", min_tokens=30, max_tokens=60))
    assert len(got.token_ids) >= 30
    (endless,) = run(engine, request("r", "regex", "(a|b)*", ignore_eos=True, max_tokens=60))
    assert (len(endless.token_ids), endless.finish_reason) == (60, FinishReason.LENGTH)


def test_tokens_that_nothing_allows_end_one_request_alone(engine: Engine, tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("z", add_special_tokens=False)
    wrong, right = run(
        engine,
        request("wrong", "choice", ["yes"], allowed_token_ids=(letter,)),
        request("right", "choice", ["yes"]),
    )
    assert wrong.finish_reason is FinishReason.ERROR
    assert "banned" in (wrong.error or "")
    assert whole(right, tokenizer) == "yes"


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("json", "{", "this json cannot be read"),
        ("json", "[]", "a schema is a JSON object"),
        ("json", {"type": "nope"}, "Invalid type: nope"),
        ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json", {"enum": [1, {"a": 2**53 + 1}]}, "enum 9007199254740993: integers beyond 2^53 cannot be held to"),
        ("json", {"type": "integer", "multipleOf": 999983}, "multipleOf 999983: its digits may be 10000 at most"),
        ("json", json.loads('{"items":' * 70 + "{}" + "}" * 70), "nested more than 64 deep"),
        (
            "json",
            {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(5)]} for i in range(9)]},
            "too large",
        ),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "a\\", "ends with half of an escape"),
        ("regex", "a?" * 9000, "9000 of its parts may be missing"),
        ("regex", "[^\\s\\S]", "no text satisfies it"),
        ("grammar", "start: start", "no text satisfies it"),
        ("choice", [], "none of them empty"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", f"start: /{'a?' * 9000}/", "9000 of its parts may be missing"),
        ("grammar", "start: T\nT: " + '"a"? ' * 9000, "9000 of its parts may be missing"),
        ("json", {"properties": {f"p{i}": {} for i in range(5000)}}, "properties: 5000 may be missing"),
        ("json", {"properties": {f"p{i}": {} for i in range(300)}}, "300 next to each other may be missing"),
        ("json", {"type": "object", "minlength": 3}, "minlength is no keyword of JSON schemas: write minLength"),
        ("grammar", "start: a\na[temperature=0.5]: /[a-z]+/", "temperature of a part"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(engine: Engine, kind: str, text: Any, sentence: str) -> None:
    (got,) = run(engine, request("r", kind, text))
    assert got.finish_reason is FinishReason.REJECTED
    assert "structured_outputs: " in (got.error or "")
    assert sentence in (got.error or "")


@pytest.mark.parametrize("runtime", [{"overlap": False}, {"delay_launch": False}])
def test_the_same_tokens_however_steps_are_launched(engine: Engine, checkpoint: Path, runtime: dict[str, Any]) -> None:
    requests = [request(str(i), "json", PEOPLE, seed=i) for i in range(5)]
    free = RequestInput(request_id="free", prompt_ids=[50] * 9, params=SamplingParams(max_tokens=40, seed=3))
    other = engine_of(checkpoint, **runtime)
    ours, theirs = run(engine, *requests, free), run(other, *requests, free)
    other.check_integrity()
    other.close()
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


def test_preempted_requests_go_on_where_they_were(engine: Engine, checkpoint: Path, tokenizer: Tokenizer) -> None:
    requests = [request(str(i), "regex", "(a|bc){80}", seed=i) for i in range(6)]
    small = engine_of(checkpoint, blocks=20)
    theirs = run(small, *requests)
    assert small.stats().preemptions > 0
    small.check_integrity()
    small.close()
    assert [one.token_ids for one in theirs] == [one.token_ids for one in run(engine, *requests)]
    assert all(re.fullmatch("(a|bc){80}", whole(one, tokenizer)) for one in theirs)


def test_an_answer_goes_on_behind_tokens_of_an_earlier_life(engine: Engine) -> None:
    (first,) = run(engine, request("r", "json", PEOPLE))
    for count in range(len(first.token_ids) + 1):
        (again,) = run(engine, request("r", "json", PEOPLE, first.token_ids[:count]))
        assert first.token_ids[:count] + again.token_ids == first.token_ids
        assert again.finish_reason is FinishReason.STOP


def test_thinking_is_free_and_the_answer_is_not(engine: Engine, tokenizer: Tokenizer) -> None:
    constraint = Constraint(kind="choice", text='["yes"]', think="open")
    end = tokenizer.encode("</think>", add_special_tokens=False)
    base = request("r", "choice", ["yes"], output=[*tokenizer.encode("so {", add_special_tokens=False), *end])
    params = SamplingParams(max_tokens=300, seed=1, structured_outputs=constraint)
    (got,) = run(
        engine, RequestInput(request_id="r", prompt_ids=base.prompt_ids, params=params, output_ids=base.output_ids)
    )
    assert tokenizer.decode(got.token_ids).strip() in ("yes", "")
    may = SamplingParams(
        max_tokens=300, seed=1, structured_outputs=Constraint(kind="choice", text='["yes"]', think="may")
    )
    (opened,) = run(engine, RequestInput(request_id="r", prompt_ids=[50], params=may))
    assert tokenizer.decode(opened.token_ids).startswith(("<think>", "yes"))


@pytest.mark.parametrize(
    "tags", [("<think>", "</think>"), ("[a", "b]"), ("<x>", "<|im_start|>"), ("<|im_start|>a", "b]")]
)
@pytest.mark.parametrize(
    ("kind", "think"),
    [
        ("free", "open"),
        ("choice", "may"),
        pytest.param("free", "may", marks=pytest.mark.slow),
        pytest.param("choice", "open", marks=pytest.mark.slow),
    ],
)
def test_thinking_ends_where_its_budget_does(
    engine: Engine, tokenizer: Tokenizer, kind: Any, think: Any, tags: tuple[str, str]
) -> None:
    """The random model thinks on for ever: it is told what closes its thinking, after just as many tokens."""
    text = '["yes"]' if kind == "choice" else ""
    begun = tokenizer.encode(tags[0], add_special_tokens=False) if think == "may" else []
    end = tokenizer.encode(tags[1], add_special_tokens=False)
    budgets, asked = (0, 1, 7), []
    for budget in budgets:
        made = Constraint(kind=kind, text=text, think=think, tags=tags, think_tokens=budget)
        params = SamplingParams(max_tokens=len(begun) + budget + 40, seed=3, structured_outputs=made)
        asked.append(RequestInput(request_id=str(budget), prompt_ids=[50], params=params, output_ids=begun))
    for budget, got in zip(budgets, run(engine, *asked), strict=True):
        said = tokenizer.decode(got.token_ids[budget:], skip_special_tokens=False)
        assert tags[1] not in tokenizer.decode(got.token_ids[:budget], skip_special_tokens=False)
        assert said.startswith(tags[1])
        if kind == "choice":
            assert said.removeprefix(tags[1]).strip() == "yes"
    ended = [*begun, *tokenizer.encode("so", add_special_tokens=False), *end]
    params = SamplingParams(max_tokens=60, seed=3, structured_outputs=msgspec.structs.replace(made, think_tokens=30))
    (kept,) = run(engine, RequestInput(request_id="r", prompt_ids=[50], params=params, output_ids=ended))
    assert kept.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if kind == "choice":
        assert tokenizer.decode(kept.token_ids).strip() == "yes"


def test_an_answer_without_thinking_has_no_budget(engine: Engine, tokenizer: Tokenizer) -> None:
    """The same tokens as without one."""
    answers = []
    for made in (None, Constraint(kind="free", think="may", think_tokens=2)):
        params = SamplingParams(max_tokens=40, seed=5, structured_outputs=made)
        (got,) = run(engine, RequestInput(request_id="r", prompt_ids=[50, 60], params=params))
        answers.append(got.token_ids)
    assert answers[0] == answers[1]


def test_a_prompt_may_hold_the_beginning_of_the_answer(engine: Engine, tokenizer: Tokenizer) -> None:
    constraint = Constraint(kind="regex", text='\\{"name": "(Ann|Bo)"\\}', prefix='{"name": "')
    params = SamplingParams(max_tokens=30, seed=1, structured_outputs=constraint)
    (got,) = run(engine, RequestInput(request_id="r", prompt_ids=[50], params=params))
    assert whole(got, tokenizer) in ('Ann"}', 'Bo"}')
