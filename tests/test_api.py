"""The engine as a library: what a caller can rely on."""

from __future__ import annotations

import pytest

from engine.api import Engine
from engine.config import EngineConfig, RuntimeConfig
from engine.types import FinishReason, RequestInput, SamplingParams
from tests.core.scripted_runner import ScriptedRunner, expected_next, pool


def request(request_id: str, prompt: list[int], **params: object) -> RequestInput:
    return RequestInput(
        request_id=request_id,
        prompt_ids=prompt,
        params=SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, **params}),
    )


def continuation(prompt: list[int], count: int, runner: ScriptedRunner) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_next(tokens, runner.info.pool, runner.info.vocab_size))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("overlap", [True, False])
def test_generates_what_the_model_says(overlap: bool) -> None:
    runner = ScriptedRunner(pool())
    engine = Engine(runner, EngineConfig(model="", runtime=RuntimeConfig(overlap=overlap))).start()
    inputs = [request(str(i), list(range(2, 3 + 3 * i))) for i in range(6)]
    for input, got in zip(inputs, engine.generate(inputs), strict=True):
        assert got.token_ids == continuation(input.prompt_ids, 8, runner)
        assert got.finish_reason is FinishReason.LENGTH
    engine.check_integrity()
    engine.close()
    assert runner.closed
