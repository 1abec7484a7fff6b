"""What the shim sends is what the SDKs' own types say, field by field: the SDKs read anything and check nothing."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import anthropic.types
import httpx
import pytest
from openai.types import responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
# Fields that the types lack: those of newer versions of the API, and thinking's in chat.
NEWER = {"store", "name", "bytes", "reasoning", "reasoning_content"}


def variants(union: Any) -> dict[str, type[BaseModel]]:
    """The types of events by the value of their field `type`."""
    found = typing.get_args(union)
    if not all(isinstance(one, type) for one in found):  # Annotated
        found = typing.get_args(found[0])
    return {typing.get_args(one.model_fields["type"].annotation)[0]: one for one in found}


def unknown(value: Any) -> set[str]:
    """Names of fields that their types do not know."""
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    if not isinstance(value, BaseModel):
        return set()
    inner = set().union(*(unknown(getattr(value, name)) for name in type(value).model_fields))
    return inner | set(value.model_extra or {})


def check(kind: type[BaseModel], body: Any) -> None:
    assert unknown(kind.model_validate(body)) <= NEWER


def events(shim: Shim, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    answer = httpx.post(f"{shim.url}{path}", json={**body, "stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    for line in answer.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("said", ["say h", "say w", "say p", "say t"])
def test_responses(shim: Shim, said: str) -> None:
    body = {
        "model": "scripted",
        "input": said,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    }
    kinds = variants(responses.ResponseStreamEvent)
    for cut in (None, 2):
        whole = httpx.post(f"{shim.url}/v1/responses", json={**body, "max_output_tokens": cut}, timeout=60).json()
        check(responses.Response, whole)
        for event in events(shim, "/v1/responses", {**body, "max_output_tokens": cut}):
            check(kinds[event["type"]], event)


@pytest.mark.parametrize("said", ["say h", "say w", "say p", "say t"])
def test_messages(shim: Shim, said: str) -> None:
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    kinds = variants(anthropic.types.RawMessageStreamEvent)
    for most in (64, 2):
        body = {
            "model": "scripted",
            "max_tokens": most,
            "temperature": 0,
            "tools": [tool],
            "messages": [{"role": "user", "content": said}],
        }
        check(anthropic.types.Message, httpx.post(f"{shim.url}/v1/messages", json=body, timeout=60).json())
        for event in events(shim, "/v1/messages", body):
            check(kinds[event["type"]], event)


@pytest.mark.parametrize("said", ["say h", "say w", "say p", "say t"])
def test_chat(shim: Shim, said: str) -> None:
    body = {
        "model": "scripted",
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [{"type": "function", "function": FUNCTION}],
        "messages": [{"role": "user", "content": said}],
    }
    check(ChatCompletion, httpx.post(f"{shim.url}/v1/chat/completions", json=body, timeout=60).json())
    usage = {"stream_options": {"include_usage": True}}
    for event in events(shim, "/v1/chat/completions", body | usage):
        check(ChatCompletionChunk, event)
