"""A client that goes away cancels its request: the engine drops it long before its end, and its blocks are free."""

from __future__ import annotations

import json
import re
import socket
import uuid
from typing import Any

import httpx
import pytest

from clients.python.local_server import LocalServer
from tests.clients.conftest import Shim, gauges, until

pytestmark = pytest.mark.xdist_group("openai")

LONG: dict[str, Any] = {"model": "demo", "prompt": "def read(path):", "max_tokens": 7000, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 7000,
    "ignore_eos": True,
}
PATHS: dict[str, dict[str, Any]] = {"/v1/completions": LONG, "/v1/chat/completions": CHAT}


def running(server: LocalServer) -> float:
    return gauges(server)["num_requests_running"]


def used(server: LocalServer) -> float:
    return gauges(server)["kv_cache_blocks_used"]


def send(shim: Shim, path: str, body: dict[str, Any], name: str) -> socket.socket:
    """A request on a bare socket, so that closing it is all that happens."""
    host, port = shim.host.split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    fields = {"Host": "shim", "Content-Type": "application/json", "X-Request-Id": name, "Content-Length": len(data)}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in fields.items()) + "\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("choices", [1, 3])
def test_the_engine_stops_when_the_client_goes(
    server: LocalServer, shim: Shim, path: str, stream: bool, choices: int
) -> None:
    until(lambda: running(server) == 0, 60, "the engine is busy with an earlier test")
    before = gauges(server)
    name = uuid.uuid4().hex
    connection = send(shim, path, {**PATHS[path], "stream": stream, "n": choices}, name)
    until(lambda: running(server) == choices, 60, "the request did not start")
    connection.close()
    until(lambda: running(server) == 0, 60, "the request went on after its client had gone")
    made = gauges(server)["generation_tokens_total"] - before["generation_tokens_total"]
    assert made < choices * PATHS[path]["max_tokens"] / 2
    until(lambda: used(server) == before["kv_cache_blocks_used"], 60, "the request's blocks were not given back")
    until(lambda: re.search(f" 499 .* id={name}", shim.log()) is not None, 30, "the log does not say 499")


def test_a_client_that_goes_while_choices_wait_leaves_nothing(server: LocalServer, shim: Shim) -> None:
    body = {**LONG, "prompt": "a long beginning " * 60, "n": 4, "stream": True}
    with httpx.stream("POST", f"{shim.url}/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_bytes()
        next(pieces)
    until(lambda: running(server) == 0, 60, "choices went on after their client had gone")
    page = httpx.get(f"{shim.url}/stats").json()
    assert page["replicas"][0]["open_requests"] == 0
