"""Clients that go are noticed soon, whatever the server did before."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from engine.serving.frontend import client_watch
from engine.serving.frontend.client_watch import ClientWatch
from engine.serving.frontend.request_tensors import LlmRequest, Wanted
from engine.serving.frontend.sender import Sender
from engine.serving.frontend.stream import Stream, now
from engine.serving.frontend.stream_table import StreamTable
from engine.serving.link.engine_view import EngineView
from engine.serving.link.link import Link
from engine.text import Tokenizer
from engine.types import ErrorCode, FinishReason, RequestInput, SamplingParams


class Ignored:
    """The link and the sender: what is aborted and ended there is of no matter."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, FinishReason]] = []
        self.some = threading.Event()

    def submit(self, request: RequestInput, suspect: bool = False) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def end(self, stream: Stream, sentence: str, code: ErrorCode, reason: FinishReason) -> None:
        self.ended.append((stream.request_id, reason))
        self.some.set()


class Clock:
    """Jumps ahead when told to, as for a process that stood still."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Client:
    """Stands for Triton's response sender. Its first answer takes `stall_s`."""

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self.gone = False
        self.asked = threading.Event()

    def is_cancelled(self) -> bool:
        if not self.asked.is_set():
            self._clock.ahead_s += self._stall_s
            self.asked.set()
        return self.gone


@pytest.fixture
def ignored() -> Ignored:
    return Ignored()


@pytest.fixture
def table(ignored: Ignored) -> StreamTable:
    return StreamTable("m", cast(Link, ignored), EngineView(), max_held=2)


def stream_of(client: Client, tokenizer: Tokenizer) -> Stream:
    request = LlmRequest(b"x", None, True, False, SamplingParams(), Wanted(text=True), None)
    stream = Stream("a", 1, cast(Any, client), request, 0, 3600.0, tokenizer, now())
    stream.tokenize(0)
    return stream


def test_a_client_that_goes_after_a_stall_is_noticed_soon(
    table: StreamTable, ignored: Ignored, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stood still for 50 s did not ask for 500 s more."""
    clock = Clock()
    monkeypatch.setattr(client_watch, "now", clock)
    client = Client(clock, stall_s=50.0)
    watch = ClientWatch(table, cast(Sender, ignored), verbose=lambda line: None, must_end=lambda: False)
    watch.start()
    try:
        table.add([stream_of(client, tokenizer)])
        watch.wake()
        assert client.asked.wait(10)
        client.gone = True
        assert ignored.some.wait(10), "nobody asked again"
        assert ignored.ended == [("a", FinishReason.CANCELLED)]
    finally:
        watch.close()


def test_streams_end_when_the_server_is_about_to_exit(
    table: StreamTable, ignored: Ignored, tokenizer: Tokenizer
) -> None:
    exits = threading.Event()
    client = Client(Clock(), stall_s=0.0)
    watch = ClientWatch(table, cast(Sender, ignored), verbose=lambda line: None, must_end=exits.is_set)
    watch.start()
    try:
        table.add([stream_of(client, tokenizer)])
        watch.wake()
        assert client.asked.wait(10)
        assert ignored.ended == []
        exits.set()
        assert ignored.some.wait(10)
        assert ignored.ended == [("a", FinishReason.ERROR)]
        assert table.all() == []
    finally:
        watch.close()
