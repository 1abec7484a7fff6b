"""What a connection may send before its request counts. The shim is a process of its own, Triton is absent."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clients.conftest import Shim, free_ports

LIMIT = 16 << 10
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    flags = ["--triton", f"127.0.0.1:{free_ports(1)[0]}", "--max-header-bytes", str(LIMIT), "--header-timeout", "1"]
    running = Shim(tmp_path_factory.mktemp("shim"), *flags)
    yield running
    running.stop()


def connect(shim: Shim) -> socket.socket:
    host, port = shim.host.split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(30)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    got = b""
    while True:
        try:
            data = connection.recv(65536)
        except ConnectionResetError:  # it was closed with bytes of ours unread
            return got
        if not data:
            return got
        got += data


def status(got: bytes) -> int:
    return int(got.split(b" ", 2)[1]) if got else 0


def flood(connection: socket.socket, start: bytes, piece: bytes, most: int) -> int:
    """Send a start and then pieces without end; how many bytes were taken."""
    sent = 0
    try:
        connection.sendall(start)
        while sent < most:
            sent += connection.send(piece)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (GET + b"X-Long: ", b"a" * 65536),
        (GET, b"X-Many: " + b"b" * 100 + b"\r\n"),
        (b"GET /", b"c" * 65536),
        (
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Trailer: ",
            b"d" * 65536,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"e" * 65536),
    ],
    ids=["one header", "many headers", "target", "trailer", "chunk extension"],
)
def test_headers_without_end_are_not_taken_into_memory(shim: Shim, start: bytes, piece: bytes) -> None:
    process = psutil.Process(shim.process.pid)
    before = process.memory_info().rss
    connection = connect(shim)
    taken = flood(connection, start, piece, 300 << 20)
    assert taken < 64 << 20  # what lay in the sockets' buffers
    assert process.memory_info().rss - before < 20 << 20
    connection.close()


@pytest.mark.parametrize("head", [GET + b"X-Long: " + b"a" * LIMIT, b"GET /" + b"c" * LIMIT + b" HTTP/1.1\r\nHost: x"])
def test_headers_that_are_too_long_are_431_in_the_apis_form(shim: Shim, head: bytes) -> None:
    connection = connect(shim)
    connection.sendall(head + b"\r\n\r\n")
    got = answer(connection)
    assert status(got) == 431
    error = json.loads(got.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["message"] == f"The request's headers may hold at most {LIMIT} bytes here."


def test_headers_that_do_not_end_are_408_and_the_connection_is_closed(shim: Shim) -> None:
    connections = [connect(shim) for _ in range(100)]
    for connection in connections:
        connection.sendall(GET)
    assert {status(answer(connection)) for connection in connections} == {408}


def test_headers_that_trickle_do_not_win_time_by_it(shim: Shim) -> None:
    connection = connect(shim)
    began = time.monotonic()
    try:
        connection.sendall(GET)
        while time.monotonic() - began < 20:
            connection.sendall(b"X-A: b\r\n")
            time.sleep(0.1)
    except OSError:
        pass
    assert time.monotonic() - began < 15


def test_a_connection_that_says_nothing_is_closed_without_a_word(shim: Shim) -> None:
    assert answer(connect(shim)) == b""


def test_a_further_request_of_a_connection_has_its_own_time(shim: Shim) -> None:
    connection = connect(shim)
    for _ in range(3):
        connection.sendall(GET + b"\r\n")
        got = b""
        while not got.endswith(b"}"):
            got += connection.recv(65536)
        assert status(got) == 200
        time.sleep(0.5)
    connection.sendall(GET)
    assert status(answer(connection)) == 408


@given(st.lists(st.integers(1, 400), max_size=8), st.integers(0, 3 * LIMIT // 2))
@settings(deadline=None, max_examples=30)
def test_however_a_head_is_cut_its_length_alone_decides(shim: Shim, cuts: list[int], size: int) -> None:
    head = GET + b"X-Long: " + b"a" * size + b"\r\n\r\n"
    counted = len("/version") + len("Host") + len("x") + len("X-Long") + size
    connection = connect(shim)
    at = 0
    try:
        for cut in cuts:
            connection.sendall(head[at : at + cut])
            at += cut
        connection.sendall(head[at:])
    except OSError:
        pass
    with connection:
        try:
            got = status(connection.recv(65536))
        except ConnectionResetError:  # it had ended before the last bytes were sent
            got = 431
    assert got == (431 if counted > LIMIT else 200)
