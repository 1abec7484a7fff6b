"""Requests that say what their answer will be: the same tokens, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SpeculationConfig
from engine.runner.build import build_runner
from engine.types import RequestError, RequestInput, RequestSpeculation, SamplingParams
from tests.runner.proposals import run
from tests.runner.test_drafts import Heard, same
from tests.runner.tiny import write

PROMPT = [9 + i % 50 for i in range(40)]


def engine_for(folder: Path, speculation: SpeculationConfig) -> Engine:
    config = EngineConfig(
        model=str(write(folder)),
        load_format="dummy",
        cache=CacheConfig(num_blocks=60),
        runtime=RuntimeConfig(device="cpu", overlap=False),
        speculation=speculation,
    )
    return Engine(build_runner(config), config)


def asked(name: str, predicted: list[int], **params: object) -> RequestInput:
    speculation = RequestSpeculation("prediction", tuple(predicted)) if predicted else None
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, speculation=speculation, **params)  # type: ignore[arg-type]
    return RequestInput(request_id=name, prompt_ids=PROMPT, params=sampling)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("method", ["prediction", "ngram", pytest.param("suffix", marks=pytest.mark.slow)])
def test_a_predicted_answer_takes_fewer_steps(tmp_path: Path, method: str, params: dict[str, float]) -> None:
    plain = engine_for(tmp_path, SpeculationConfig())
    want = run(plain, [asked("a", [], **params)])
    answer = want.tokens["a"]
    changed = [*answer[:20], 1, 1, *answer[22:40], *answer[45:]]
    for predicted, accepted in ((answer, 45), (changed, 25), ([1] * 50, 0)):
        engine = engine_for(tmp_path, SpeculationConfig(method=method, tokens=4))
        same(run(engine, [asked("a", predicted, **params)]), want)
        assert engine.stats().accepted_tokens >= accepted


def test_requests_without_a_prediction_are_not_drafted_for_by_that_method(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, SpeculationConfig(method="prediction"))
    run(engine, [asked("a", [], temperature=0.0)])
    assert engine.stats().draft_tokens == 0


def test_a_prediction_that_cannot_be_taken_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"speculation.method is none"):
        engine_for(tmp_path, SpeculationConfig()).submit(asked("a", [5]), Heard())
    with pytest.raises(RequestError, match=r"speculation.token_ids"):
        engine_for(tmp_path, SpeculationConfig(method="prediction")).submit(asked("a", [1 << 20]), Heard())
