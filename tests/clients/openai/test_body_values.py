"""How many values a body may hold."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.openai import body_values
from clients.openai.app import create_app
from clients.openai.body_values import MAX_TEXTS, MAX_VALUES, check_values
from clients.openai.config import ShimConfig
from clients.openai.errors import ApiError

SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a"\\{[,]}\n', max_size=6)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5)
)


def texts_of(value: Any) -> int:
    """Names, texts, lists and objects."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(texts_of, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(texts_of, value))
    return int(isinstance(value, str))


@given(JSON)
def test_what_is_counted_is_what_the_parser_would_make(value: Any) -> None:
    texts = texts_of(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(body_values, "_MIN_BYTES", 0)
        patched.setattr(body_values, "MAX_TEXTS", texts)
        for data in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            check_values(data.encode())
        patched.setattr(body_values, "MAX_TEXTS", texts - 1)
        if texts:
            with pytest.raises(ApiError) as caught:
                check_values(json.dumps(value).encode())
            assert caught.value.status == 413


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


TURN = {"role": "user", "content": ""}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": ""}
MANY = MAX_TEXTS // 5 + 1


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/v1/chat/completions", body(messages=[TURN] * MANY)),
        ("/v1/chat/completions", body(messages=[{"role": "user", "content": [PART] * MANY}])),
        ("/v1/chat/completions", body(messages=[TURN, {"role": "assistant", "tool_calls": [CALL] * MANY}])),
        ("/v1/chat/completions", body(messages=[TURN], metadata={f"x{place}": 1 for place in range(MAX_TEXTS)})),
        ("/v1/chat/completions", body(messages=[TURN], chat_template_kwargs={"a": [[[]]] * MAX_TEXTS})),
        ("/v1/completions", body(prompt="", logit_bias={f"x{place}": "" for place in range(MAX_TEXTS)})),
        ("/v1/completions", body(prompt=[1] * (MAX_VALUES + 1))),
        ("/v1/responses", body(input=[TURN] * MANY)),
        ("/v1/messages", body(max_tokens=1, messages=[TURN] * MANY)),
        ("/v1/messages/count_tokens", body(messages=[TURN] * MANY)),
        ("/tokenize", body(messages=[TURN] * MANY)),
        ("/detokenize", body(tokens=[1] * (MAX_VALUES + 1))),
        ("/invocations", body(messages=[TURN] * MANY)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_of_very_many_values_is_refused_before_objects_are_made_of_it(path: str, data: bytes) -> None:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(ShimConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://shim") as client:
            return await client.post(path, content=data, headers={"Content-Type": "application/json"})

    response = asyncio.run(run())
    assert response.status_code == 413, response.text
    assert "131,072 names, texts, lists and objects, and 2,097,152 values in all" in response.text


def test_long_texts_and_long_prompts_of_ids_are_no_matter() -> None:
    check_values(body(messages=[{"role": "user", "content": '{["a", \\"b\\"]}, ' * 100_000}]))
    check_values(body(prompt=[7] * 1_000_000))
    check_values(body(messages=[TURN] * 16_384))
