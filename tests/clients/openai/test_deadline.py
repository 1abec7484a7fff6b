"""A request's timeout holds whoever is slow: its engine, its chat template, or the server."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from clients.python.local_server import LocalServer
from tests.clients.conftest import Shim, until

pytestmark = pytest.mark.xdist_group("openai")

COMPLETION = {"model": "demo", "prompt": "def read(path):", "max_tokens": 4}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
# who is stopped: words of its command line
ENGINE, RENDERER, SERVER = (
    ("engine.serving.host", "demo"),
    ("engine.serving.frontend.renderer", "/demo"),
    ("bin/tritonserver",),
)


@contextlib.contextmanager
def stopped(server: LocalServer, words: tuple[str, ...]) -> Iterator[None]:
    """The server's processes with such words stand still."""
    assert server._process is not None
    found = []
    for process in psutil.Process(server._process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            line = " ".join(process.cmdline())
            found += [process] if all(word in line for word in words) else []
    assert found
    try:
        for process in found:
            process.send_signal(signal.SIGSTOP)
        yield
    finally:
        for process in found:
            with contextlib.suppress(psutil.Error):  # the server has ended one that did not answer
                process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("who", [ENGINE, SERVER])
def test_health_says_so_while_a_process_stands_still(server: LocalServer, shim: Shim, who: tuple[str, ...]) -> None:
    healthy = lambda: "demo" in httpx.get(f"{shim.url}/health", timeout=60).json().get("models", ())  # noqa: E731
    with stopped(server, who):
        until(lambda: not healthy(), 30, "it is said to be well")
        assert "demo" not in httpx.get(f"{shim.url}/stats", timeout=60).json()["replicas"][0]["ready_models"]
    until(healthy, 30, "it went on, and is not said to be well")


@pytest.mark.parametrize(
    ("who", "path", "body"),
    [
        (ENGINE, "/v1/completions", COMPLETION),
        (ENGINE, "/v1/completions", {**COMPLETION, "n": 3, "stream": True}),
        (RENDERER, "/v1/chat/completions", CHAT),
        (SERVER, "/v1/completions", COMPLETION),
        (SERVER, "/v1/chat/completions", {**CHAT, "stream": True}),
    ],
)
def test_a_timeout_holds_while_a_process_stands_still(
    server: LocalServer, shim: Shim, who: tuple[str, ...], path: str, body: dict[str, Any]
) -> None:
    with stopped(server, who):
        began = time.monotonic()
        answer = httpx.post(shim.url + path, json={**body, "timeout": 1.0}, timeout=60)
        took = time.monotonic() - began
    assert answer.status_code == 504, answer.text
    assert "ran past its timeout" in answer.json()["error"]["message"]
    assert took < 8.0  # before, nobody gave up for another 15 s
    again = lambda: httpx.post(shim.url + path, json=body, timeout=60).status_code == 200  # noqa: E731
    until(again, 60, "the processes that went on, or those in their place, do not answer")
