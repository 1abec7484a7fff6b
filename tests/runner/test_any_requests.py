"""Whatever requests ask for and whenever they come, padded steps give the tokens that steps of their own size give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.core.commit import InFlight
from engine.runner.build import build_runner
from engine.types import RequestInput, SamplingParams, TokenEvent
from tests.runner.test_graphs import TINY, Recorder, checkpoint

__all__ = ["checkpoint"]
REQUESTS = 40
VOCAB = TINY["vocab_size"]


class Heard:
    """A sink: everything that was said of each request."""

    def __init__(self) -> None:
        self.of: dict[str, list[Any]] = {}

    def deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.of.setdefault(event.request_id, []).append((event.token_ids, event.finish_reason, event.error))


def request(draw: random.Random, name: str) -> RequestInput:
    """A prompt of any length and any extras."""
    asked: dict[str, Any] = {"max_tokens": draw.randint(1, 20), "temperature": draw.choice((0.0, 0.8))}
    extras = {
        "repetition_penalty": draw.uniform(1.01, 1.8),
        "presence_penalty": draw.uniform(-2, 2),
        "logit_bias": {draw.randrange(VOCAB): draw.uniform(-100, 100)},
        "allowed_token_ids": tuple(draw.sample(range(VOCAB), 7)),
        "min_tokens": draw.randint(0, asked["max_tokens"]),
        "bad_words": ("stands for the ids below",),
        "logprobs": draw.randint(0, 5),
        "prompt_logprobs": draw.randint(0, 3),
        "ignore_eos": True,
    }
    asked |= {name: value for name, value in extras.items() if draw.random() < 0.15}
    words = [[draw.randrange(VOCAB)] for _ in range(3)] if "bad_words" in asked else []
    prompt = [draw.randrange(VOCAB) for _ in range(draw.choice((1, draw.randint(1, 40), draw.randint(1, 150))))]
    params = SamplingParams(seed=draw.randint(0, 999), **asked)
    return RequestInput(request_id=name, prompt_ids=prompt, params=params, bad_word_ids=words)


def play(folder: Path, seed: int, recorder: Recorder | None) -> dict[str, list[Any]]:
    """Requests that come at random to an engine of random limits; its steps are padded where there is a recorder."""
    draw = random.Random(seed)
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=draw.choice((5, 12, 17)), token_budget=draw.choice((128, 300))),
        cache=CacheConfig(num_blocks=draw.choice((60, 200))),
        runtime=RuntimeConfig(device="cpu"),
    )
    runner = build_runner(config)
    if recorder is not None:
        runner.use_graphs(recorder)
    engine, heard = Engine(runner, config), Heard()
    waiting = [request(draw, str(i)) for i in range(REQUESTS)]
    inflight: InFlight | None = None
    while waiting or engine.loop.live or inflight is not None:
        while waiting and draw.random() < 0.3:
            engine.submit(waiting.pop(), heard)
        inflight = engine.loop.iterate(inflight)
    engine.check_integrity()
    return heard.of


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_padded_steps_give_the_same_answers(checkpoint: Path, seed: int) -> None:
    recorder = Recorder()
    assert play(checkpoint, seed, recorder) == play(checkpoint, seed, None)
    assert len(recorder.replayed) > 15
    assert any(0 < shape.num_single < shape.entries for shape in recorder.captured)
