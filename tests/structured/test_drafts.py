"""Answers under constraints are drafted for, and stay the same: a mask for each drafted position, and what a grammar
forces comes as drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine, Generation
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.runner.runner import DeviceRunner
from engine.types import Constraint, RequestInput, RequestSpeculation, SamplingParams
from tests.runner.test_graphs import Recorder

PLACE = {
    "type": "object",
    "properties": {
        "street_and_house_number": {"enum": ["Main Street 1", "Main Street 2"]},
        "postal_code_of_the_city": {"type": "string", "pattern": "^[0-9]{3}$"},
        "confirmed": {"type": "boolean"},
    },
    "required": ["street_and_house_number", "postal_code_of_the_city", "confirmed"],
    "additionalProperties": False,
}
ASKED: list[tuple[str, Any, dict[str, Any]]] = [
    ("json", PLACE, {"temperature": 0.0}),
    ("json", PLACE, {"temperature": 1.0, "logprobs": 2}),
    ("json", {"type": "array", "items": PLACE, "minItems": 2, "maxItems": 2}, {"temperature": 0.8, "top_k": 20}),
    ("regex", "(the same words again, ){3}[a-z]{1,9}", {"temperature": 1.0}),
    ("choice", ["a long answer of many words", "a long answer of few"], {"temperature": 1.0}),
    ("regex", "[a-c]{2,40}", {"temperature": 1.0, "min_tokens": 9}),
    ("regex", "[a-c]{2,40}", {"temperature": 1.0, "max_tokens": 5}),
]


def engine_of(folder: Path, method: str, overlap: bool, padded: bool = False) -> Engine:
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=8, token_budget=64),
        cache=CacheConfig(num_blocks=400),
        runtime=RuntimeConfig(device="cpu", dtype="float32", overlap=overlap),
        speculation=SpeculationConfig(method=method, tokens=None if method == "none" else 4),
    )
    made = Engine.from_config(config)
    if padded:
        assert isinstance(made.runner, DeviceRunner)
        made.runner.use_graphs(Recorder())
    return made.start()


def requests(predicted: list[int] | None = None) -> list[RequestInput]:
    made = []
    for i, (kind, text, params) in enumerate(ASKED):
        constraint = Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text), whitespace="")  # type: ignore[arg-type]
        wanted = {"max_tokens": 200, "seed": i, "structured_outputs": constraint, **params}
        if predicted:
            wanted["speculation"] = RequestSpeculation("prediction", tuple(predicted))
        made.append(RequestInput(request_id=str(i), prompt_ids=[40 + i, 41, 42], params=SamplingParams(**wanted)))
    free = SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=-2.0, ignore_eos=True)
    return [*made, RequestInput(request_id="free", prompt_ids=[50, 51], params=free)]


def told(answers: list[Generation]) -> list[Any]:
    return [(answer.token_ids, answer.finish_reason, answer.error) for answer in answers]


@pytest.fixture(scope="module")
def want(checkpoint: Path) -> list[Any]:
    """The same whether steps overlap or not."""
    plain = engine_of(checkpoint, "none", overlap=True)
    answers = told(plain.generate(requests()))
    plain.close()
    return answers


@pytest.mark.parametrize(
    ("overlap", "padded"), [(True, True), pytest.param(True, False, marks=pytest.mark.slow), (False, False)]
)
@pytest.mark.xdist_group("drafts under constraints")
def test_answers_are_those_without_drafts(checkpoint: Path, want: list[Any], overlap: bool, padded: bool) -> None:
    for method in ("prediction", "ngram"):
        engine = engine_of(checkpoint, method, overlap, padded)
        assert told(engine.generate(requests())) == want
        engine.check_integrity()
        assert engine.stats().accepted_tokens > 20, "what grammars force was drafted, and stood"
        if method == "prediction":
            longest = max(want, key=lambda one: len(one[0]))[0]
            assert told(engine.generate(requests(longest))) == want
        engine.close()
