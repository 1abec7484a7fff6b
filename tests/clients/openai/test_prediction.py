"""OpenAI's predicted outputs through the shim: the same answer, and how much of the prediction it holds."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from clients.python.local_server import LocalServer
from engine.types import MAX_PREDICTED_IDS
from tests.clients.conftest import Shim, gauges, until

pytestmark = pytest.mark.xdist_group("openai")

ASKED = {
    "model": "demo",
    "messages": [{"role": "user", "content": "How do I open a file?"}],
    "max_completion_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}


def answer(shim: Shim, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{shim.url}/v1/chat/completions", json={**ASKED, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_predicted_answer_is_the_same_and_its_tokens_are_counted(shim: Shim, server: LocalServer) -> None:
    plain = answer(shim)
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    before = gauges(server).get("spec_decode_num_accepted_tokens_total", 0.0)
    predicted = answer(shim, prediction={"type": "content", "content": text + " and more"})
    assert predicted["choices"][0]["message"]["content"] == text
    # The model is noise, and its text has shorter tokens than it gave: half of them are others.
    tokens = httpx.post(
        f"{shim.url}/tokenize",
        json={"model": "demo", "prompt": text + " and more", "add_special_tokens": False},
        timeout=60,
    )
    details = predicted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 15
    assert sum(details.values()) == tokens.json()["count"]
    until(
        lambda: gauges(server).get("spec_decode_num_accepted_tokens_total", 0.0) > before,
        10,
        "the engine drafted what was predicted",
    )


def test_parts_and_streams_predict_as_well(shim: Shim) -> None:
    text = answer(shim)["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    fields = {"prediction": {"type": "content", "content": parts}, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    response = httpx.post(f"{shim.url}/v1/chat/completions", json={**ASKED, **fields}, timeout=60)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert said == text
    assert events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 15


def test_a_model_that_takes_no_predictions_says_so(shim: Shim) -> None:
    fields = {"model": "scripted", "prediction": {"type": "content", "content": "x"}}
    response = httpx.post(f"{shim.url}/v1/chat/completions", json={**ASKED, **fields}, timeout=60)
    assert response.status_code == 400
    assert "takes no predictions" in response.json()["error"]["message"]


def test_a_prediction_beyond_its_bound_is_refused_by_its_name(shim: Shim) -> None:
    response = httpx.post(
        f"{shim.url}/v1/chat/completions",
        json={**ASKED, "prediction": {"type": "content", "content": "0" * (MAX_PREDICTED_IDS + 1)}},
        timeout=60,
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prediction"
