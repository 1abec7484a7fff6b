"""Several replicas: what fails before the first token is tried elsewhere, what fails after it is not.

Both replicas are the same real server behind two TCP relays, so that a connection can be broken at a chosen moment.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from clients.python.local_server import LocalServer
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")


class Relay:
    """Forwards bytes between its port and a server. `refuse` closes connections when something is sent on them."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        self.cut_after: int | None = None  # bytes from the client until every connection is cut
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take the replica off the network."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        for pair in self._pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                client, _ = self._listener.accept()
                pair = (client, socket.create_connection(self._target))
                self._pairs.append(pair)
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return self.cut_pair(client, server)
                    if source is client and self.cut_after is not None and len(data) > self.cut_after:
                        self.cut_after = None
                        return self.cut()
                    (server if source is client else client).sendall(data)

    @staticmethod
    def cut_pair(*pair: socket.socket) -> None:
        for one in pair:
            with contextlib.suppress(OSError):
                one.close()


@pytest.fixture(scope="module")
def relays(server: LocalServer) -> Iterator[list[Relay]]:
    made = [Relay(server.grpc), Relay(server.grpc)]
    yield made
    for relay in made:
        relay.close()


@pytest.fixture(scope="module")
def pair(server: LocalServer, relays: list[Relay], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    port = server.metrics.rsplit(":", 1)[1]
    flags = [flag for relay in relays for flag in ("--triton", f"{relay.address}:{port}")]
    running = Shim(tmp_path_factory.mktemp("pair"), *flags)
    yield running
    running.stop()


def metric(shim: Shim, name: str) -> float:
    lines = httpx.get(f"{shim.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def complete(shim: Shim, **more: object) -> httpx.Response:
    body = {"model": "demo", "prompt": "def read(path):", "temperature": 0, "max_tokens": 8, **more}
    return httpx.post(f"{shim.url}/v1/completions", json=body, timeout=30)


def owner(shim: Shim, relays: list[Relay], prompt: str) -> Relay:
    """The relay that a streamed request with this prompt is open on."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{shim.url}/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_bytes()
        next(pieces)
        loads = [r["open_requests"] for r in httpx.get(f"{shim.url}/stats").json()["replicas"]]
    time.sleep(0.6)  # the next look at /stats is a fresh one
    assert sorted(loads) == [0, 1]
    return relays[loads.index(1)]


def test_the_same_beginning_goes_to_the_same_replica(pair: Shim, relays: list[Relay]) -> None:
    first = owner(pair, relays, "one beginning " * 30)
    assert owner(pair, relays, "one beginning " * 30 + "and another end") is first


def test_a_request_whose_replica_breaks_before_its_first_token_is_tried_on_the_other(
    pair: Shim, relays: list[Relay]
) -> None:
    prompt = "a prompt of some size " * 40
    expected = complete(pair, prompt=prompt).json()["choices"][0]["text"]
    before = metric(pair, "nereid_openai_retries_total")
    owner(pair, relays, prompt).cut_after = 500  # the prompt itself; health checks are smaller
    answer = complete(pair, prompt=prompt)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == expected
    assert metric(pair, "nereid_openai_retries_total") == before + 1


def test_a_stream_that_breaks_later_ends_with_an_error_and_is_not_repeated(pair: Shim, relays: list[Relay]) -> None:
    before = metric(pair, "nereid_openai_retries_total")
    body = {"model": "demo", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    received = b""
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        for data in response.iter_bytes():
            if not received:
                for relay in relays:
                    relay.cut()
            received += data
    events = received.decode().split("\n\n")
    assert '"error"' in events[-3]
    assert events[-2] == "data: [DONE]"
    assert metric(pair, "nereid_openai_retries_total") == before


def test_a_replica_that_is_gone_is_left_out_and_without_any_the_answer_is_503(
    server: LocalServer, tmp_path: Path
) -> None:
    made = [Relay(server.grpc), Relay(server.grpc)]
    port = server.metrics.rsplit(":", 1)[1]
    shim = Shim(tmp_path, *[flag for relay in made for flag in ("--triton", f"{relay.address}:{port}")])
    try:
        made[0].close()
        for _ in range(3):
            assert complete(shim).status_code == 200
        made[1].close()
        answer = complete(shim)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        end = time.monotonic() + 10
        while httpx.get(f"{shim.url}/health").status_code != 503:
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        shim.stop()


def test_a_model_that_cannot_be_loaded_takes_no_other_out_of_service(server: LocalServer, shim: Shim) -> None:
    """tritonserver's own readiness is that of all models: it ends with the first load that fails."""
    config = {"backend": "python", "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]}
    broken = base64.b64encode(b"raise ValueError('no model')").decode()
    parameters = {"config": json.dumps(config), "file:1/model.py": broken}
    loaded = httpx.post(
        f"http://{server.http}/v2/repository/models/broken/load", json={"parameters": parameters}, timeout=60
    )
    assert loaded.status_code == 400
    assert httpx.get(f"http://{server.http}/v2/health/ready").status_code == 400
    looked = metric(shim, "nereid_openai_replica_up")
    time.sleep(1.0)  # three health checks
    assert metric(shim, "nereid_openai_replica_up") == looked == 1
    assert complete(shim).status_code == 200
