"""Beam search through the whole engine gives transformers' answers, scores and order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.runner.build import build_runner
from engine.types import FinishReason, RequestInput, SamplingParams, TokenEvent
from tests.gate.conftest import as_param, quick
from tests.gate.families import FAMILIES
from tests.gate.oracle import Golden, golden
from tests.gate.shapes import SHAPES
from tests.test_api import Sink

LENGTH, WIDTH, PAD = 12, 3, 1
NAMES = ("qwen3", "deepseek-v2")
PLAYED = [quick(shape) for shape in (*SHAPES, *FAMILIES) if shape.name in NAMES]


@pytest.fixture(scope="module", params=[as_param(shape) for shape in PLAYED])
def truth(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Golden:
    return golden(request.param, Path(pytestconfig.rootpath) / ".cache" / "gate")


@pytest.fixture(scope="module")
def model(truth: Golden) -> Any:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(truth.folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def engine(truth: Golden, device: str) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(truth.folder),
        max_model_len=512,
        scheduler=SchedulerConfig(max_rows=8),
        cache=CacheConfig(num_blocks=512),
        runtime=RuntimeConfig(device=device, dtype="float32"),
    )
    engine = Engine(build_runner(config), config).start()
    yield engine
    engine.check_integrity()
    engine.close()


def search(engine: Engine, prompt: list[int], **params: Any) -> list[TokenEvent]:
    width = params["beam_width"]
    ids = [f"beam-{number}" for number in range(width)]
    sink = Sink(width)
    params = {"temperature": 0.0, "logprobs": 0, **params}
    engine.submit(
        RequestInput(request_id=ids[0], prompt_ids=prompt, params=SamplingParams(**params), answer_ids=ids), sink
    )
    assert sink.ended.wait(120)
    return sorted(sink.events, key=lambda event: ids.index(event.request_id))


@pytest.mark.parametrize(
    ("penalty", "early", "least"),
    [(1.0, False, 0), (1.0, True, 0), (0.0, False, 0), (2.0, False, 3), (-1.0, True, 3)],
)
def test_answers_are_those_of_transformers(
    engine: Engine, model: Any, truth: Golden, penalty: float, early: bool, least: int
) -> None:
    ended = 0
    for sequence in truth.sequences[-2:]:
        # Tokens that the likeliest answers hold.
        free = search(engine, sequence.prompt, beam_width=WIDTH, max_tokens=LENGTH)
        stops = [free[0].token_ids[4], free[-1].token_ids[5]]
        prompt = torch.tensor([sequence.prompt])
        with torch.inference_mode():
            theirs = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                do_sample=False,
                max_new_tokens=LENGTH,
                min_new_tokens=least,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=stops,
                pad_token_id=PAD,
                return_dict_in_generate=True,
                output_scores=True,
            )
        ours = search(
            engine,
            sequence.prompt,
            beam_width=WIDTH,
            max_tokens=LENGTH,
            min_tokens=least,
            length_penalty=penalty,
            early_stopping=early,
            stop_token_ids=tuple(stops),
        )
        for event, tokens, score in zip(ours, theirs.sequences, theirs.sequences_scores, strict=True):
            count = len(event.token_ids)
            assert event.token_ids == tokens[len(sequence.prompt) :][:count].tolist()
            assert set(tokens[len(sequence.prompt) + count :].tolist()) <= {PAD}
            assert event.cumulative_logprob / count**penalty == pytest.approx(float(score), rel=1e-5, abs=1e-4)
            assert event.cumulative_logprob == pytest.approx(sum(e.logprobs[0] for e in event.logprobs or ()))
            ended += event.finish_reason is FinishReason.STOP
    assert ended or penalty > 1  # which favours those that go on
