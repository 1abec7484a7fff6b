"""A model that drafts, behind the real server: the same answers in fewer steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.serving.launch import repository
from tests.e2e.conftest import SETTINGS
from tests.e2e.harness import Call, Server, text_of, wait_until

SPECULATION = {"speculation.method": "ngram", "speculation.tokens": "4"}
TEXT = "A server takes a question and gives an answer. A server takes a question and gives an"
ASKED = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": -2.0},
    {"temperature": 0.8, "seed": 11, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "stop": ["answer"]},
    {"temperature": 0.0, "min_tokens": 20},
)


@pytest.fixture
def drafted(server: Server, models: Path, checkpoint: Path) -> Iterator[str]:
    repository.write_llm(models, "drafted", {"model": str(checkpoint), **SETTINGS, **SPECULATION})
    assert server.load("drafted") is None
    yield "drafted"
    server.unload("drafted")
    shutil.rmtree(models / "drafted")


def said(server: Server, model: str, fields: dict[str, object]) -> str:
    asked = json.dumps({"max_tokens": 60, "ignore_eos": True, **fields})
    return text_of(Call(server, model, text_input=TEXT, stream=True, sampling_parameters=asked).all())


def test_streams_say_what_they_say_without_drafts(server: Server, drafted: str) -> None:
    for fields in ASKED:
        assert said(server, drafted, fields) == said(server, "demo", fields)

    def counted(name: str, model: str) -> float:
        return server.metric(f"vllm:spec_decode_num_{name}_total", model=model)

    wait_until(lambda: counted("accepted_tokens", drafted) > 20, "the metrics follow", 10.0)
    assert counted("drafts", drafted) <= counted("draft_tokens", drafted)
    assert counted("accepted_tokens", drafted) <= counted("draft_tokens", drafted)
    assert counted("drafts", "demo") == 0


def test_a_request_may_go_without_drafts(server: Server, drafted: str) -> None:
    def counted(name: str) -> float:
        return server.metric(f"vllm:{name}_total", model=drafted)

    tokens, drafts = counted("generation_tokens"), counted("spec_decode_num_drafts")  # of a load before
    fields = {"temperature": 0.0, "speculation": {"method": "none"}}
    assert said(server, drafted, fields) == said(server, "demo", {"temperature": 0.0})
    wait_until(lambda: counted("generation_tokens") >= tokens + 60, "the metrics follow", 10.0)
    assert counted("spec_decode_num_drafts") == drafts
