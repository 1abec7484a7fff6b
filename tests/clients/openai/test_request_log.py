"""A line of JSON a request, without what people wrote unless that is asked for."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from clients.openai.request_log import RequestLog, shown
from clients.openai.trace import Trace
from tests.clients.openai.test_gate import asker

SECRET = "my name is Ann"


def body(**fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def test_texts_are_their_lengths() -> None:
    messages = [{"role": "user", "content": SECRET}, {"role": "tool", "content": SECRET, "tool_call_id": SECRET}]
    tool = {"type": "function", "function": {"name": SECRET, "parameters": {SECRET: 1}}}
    fields = {"model": "m", "messages": messages, "temperature": 0.5, "stream": True, "user": SECRET, "stop": [SECRET]}
    said = shown(body(**fields, tools=[tool], metadata={SECRET: SECRET}, prompt=[1, 2, 3], **{SECRET: 1}), texts=False)
    assert SECRET not in json.dumps(said)
    assert said == {
        "model": "m",
        "messages": [{"role": "user", "content": "<14 characters>"}, {"role": "tool", "content": "<14 characters>"}],
        "temperature": 0.5,
        "stream": True,
        "user": "<14 characters>",
        "stop": "<1 items>",
        "tools": "<1 items>",
        "metadata": "<1 fields>",
        "prompt": "<3 items>",
        "<14 characters>": 1,
    }


@pytest.mark.parametrize(
    "data",
    [SECRET.encode(), b'"my name is Ann"', b"\xff", b'{"a": "\xff"}', b"[" * 100_000, b"", b" " * (5 << 20)],
)
def test_what_is_no_request_shows_nothing_either(data: bytes) -> None:
    assert SECRET not in str(shown(data, texts=False))
    assert len(json.dumps(shown(data, texts=True) or "")) < 150_000


def test_a_file_that_is_full_is_moved_and_nobody_else_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "log"
    first, second = (RequestLog(file, 2000, texts=False) for _ in range(2))  # two workers
    for number in range(20):
        (first, second)[number % 2].write(Trace(f"r{number}"), "POST", "/v1/completions", 200)
    lines = [json.loads(line) for part in (tmp_path / "log.1", file) for line in part.read_text().splitlines()]
    numbers = [int(line["id"][1:]) for line in lines]
    assert numbers == list(range(20 - len(numbers), 20))
    assert all(part.stat().st_size <= 2000 for part in (file, tmp_path / "log.1"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first.close()
    second.close()


def test_the_shim_writes_what_it_answered(tmp_path: Path) -> None:
    for texts in (False, True):
        file = tmp_path / f"log-{texts}"
        ask = asker(request_log=str(file), request_log_texts=texts, api_keys=("k",))
        ask("GET", "/health")
        ask("POST", "/v1/completions", json={"model": "m", "prompt": SECRET}, headers={"Authorization": "Bearer k"})
        ask("POST", "/v1/completions", json={"model": "m", "prompt": SECRET})
        answered, refused = (json.loads(line) for line in file.read_text().splitlines())
        assert (answered["path"], answered["status"], answered["caller"]) == ("/v1/completions", 503, "key0")
        assert (refused["status"], refused["request"]) == (401, None)
        assert (SECRET in answered["request"]) if texts else answered["request"]["prompt"] == "<14 characters>"
    with pytest.raises(ValueError, match="needs --request-log"):
        asker(request_log_texts=True)
