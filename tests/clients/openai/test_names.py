"""Other names of models, and the paths that platforms ask a server for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

HELLO = "Hello there, 20 °C out."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "say h"}], "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def named(triton: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    flags = ("--alias", "gpt-4o=scripted", "--alias", "lost=nothing")
    shim = Shim(tmp_path_factory.mktemp("named"), "--triton", triton, *flags)
    yield shim
    shim.stop()


def test_an_alias_is_served_and_listed(named: Shim) -> None:
    client = OpenAI(base_url=f"{named.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="gpt-4o", **CHAT)
    assert answer.choices[0].message.content == HELLO
    assert answer.model == "scripted", "the answer says which model it is from"
    assert [model.id for model in client.models.list()] == ["demo", "gpt-4o", "scripted"]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    assert client.responses.create(model="gpt-4o", input="say h", temperature=0).output_text == HELLO
    with pytest.raises(NotFoundError, match="nothing"):
        client.chat.completions.create(model="lost", **CHAT)


def test_invocations_are_chat_or_completions(named: Shim) -> None:
    chat = httpx.post(f"{named.url}/invocations", json={"model": "scripted", **CHAT}, timeout=60).json()
    assert chat["choices"][0]["message"]["content"] == HELLO
    body = {"model": "gpt-4o", "prompt": "oh", "max_tokens": 32, "temperature": 0}
    text = httpx.post(f"{named.url}/invocations", json=body, timeout=60).json()
    assert text["choices"][0]["text"] == HELLO
    streamed = httpx.post(f"{named.url}/invocations", json={**body, "stream": True}, timeout=60)
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ({"model": "scripted"}, "messages"),
        ({"prompt": "oh"}, "Several models"),
        ({"model": "scripted", "prompt": 5}, "prompt"),
        ([1], "JSON object"),
    ],
)
def test_other_invocations_are_refused(named: Shim, body: Any, about: str) -> None:
    answer = httpx.post(f"{named.url}/invocations", json=body, timeout=60)
    assert answer.status_code == 400
    assert about in answer.json()["error"]["message"]


def test_an_invocation_that_is_not_utf_8_is_refused(named: Shim) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{named.url}/invocations", content=b'{"a\xff": 1}', headers=headers, timeout=60)
    assert answer.status_code == 400
    assert "not a JSON object" in answer.json()["error"]["message"]


def test_ping_and_load(named: Shim) -> None:
    assert httpx.get(f"{named.url}/ping").status_code == 200
    assert httpx.post(f"{named.url}/ping").status_code == 200
    assert httpx.get(f"{named.url}/load").json() == {"server_load": 0}


def test_an_alias_is_a_name_and_a_model(tmp_path: Any) -> None:
    with pytest.raises(AssertionError, match="--alias 'gpt-4o' is not NAME=MODEL"):
        Shim(tmp_path, "--alias", "gpt-4o")
    with pytest.raises(AssertionError, match="--alias 'a' is given twice, for 'demo' and for 'scripted'"):
        Shim(tmp_path, "--alias", "a=demo", "--alias", "a=scripted")
