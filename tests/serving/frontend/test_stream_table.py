"""The table knows which requests are open and what an engine that dies was told of them."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from engine.serving.frontend.request_tensors import LlmRequest, Wanted
from engine.serving.frontend.stream import Stream, now
from engine.serving.frontend.stream_table import StreamTable
from engine.serving.link.engine_view import EngineView
from engine.serving.link.link import Link
from engine.text import Tokenizer
from engine.types import ErrorCode, RequestError, RequestInput, SamplingParams


class Sent:
    """What would have gone over the link."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, bool]] = []
        self.aborted: list[str] = []

    def submit(self, request: RequestInput, suspect: bool = False) -> None:
        self.submitted.append((request.request_id, suspect))

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def engine() -> EngineView:
    return EngineView()


@pytest.fixture
def table(sent: Sent, engine: EngineView) -> StreamTable:
    return StreamTable("m", cast(Link, sent), engine, max_held=2)


@pytest.fixture
def stream(tokenizer: Tokenizer) -> Any:
    def make(name: str) -> Stream:
        request = LlmRequest(b"x", None, True, False, SamplingParams(), Wanted(text=True), None)
        made = Stream(name, 1, None, request, 0, 60.0, tokenizer, now())
        made.tokenize(0)
        return made

    return make


def test_what_is_open_is_sent_to_each_engine_that_comes(table: StreamTable, sent: Sent, stream: Any) -> None:
    early, late, ended = stream("early"), stream("late"), stream("ended")
    table.add([early])
    table.submit([early])
    assert sent.submitted == []
    table.engine_came()
    table.add([late, ended])
    table.submit([late])
    table.drop([ended])
    table.submit([ended])
    assert sent.submitted == [("early", False), ("late", False)]


def test_few_wait_for_an_engine_and_none_for_one_that_never_comes(
    table: StreamTable, engine: EngineView, stream: Any
) -> None:
    table.add([stream("a"), stream("b")])
    with pytest.raises(RequestError, match="it is being restarted and 2 requests wait") as refused:
        table.add([stream("c")])
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert [left.request_id for left in table.engine_failed("it does not load")] == ["a", "b"]
    with pytest.raises(RequestError, match="it does not load"):
        table.add([stream("d")])
    assert engine.failed == "it does not load"


def test_the_third_death_without_a_token_between_ends_a_request_and_spares_those_that_did_not_run(
    table: StreamTable, sent: Sent, engine: EngineView, stream: Any
) -> None:
    one, other, late = stream("one"), stream("other"), stream("late")
    table.add([one, other])
    table.submit([one, other])
    assert list(table.engine_died()) == []  # it had not come: no death of theirs
    for _ in range(2):
        table.engine_came()
        table.engine_runs_alone(None)
        assert list(table.engine_died()) == []
    sent.submitted.clear()
    other.deaths = 0  # a token came
    table.engine_came()
    assert sent.submitted == [("one", True), ("other", False)]
    table.engine_runs_alone("one")
    table.add([late])
    assert list(table.engine_died()) == [one]
    assert (engine.blamed, other.deaths, late.deaths) == (1, 0, 0)


def test_draining_ends_with_the_last_stream(table: StreamTable, sent: Sent, stream: Any) -> None:
    one, other = stream("one"), stream("other")
    table.add([one, other])
    assert not table.drain(0.0)
    heard: list[bool] = []
    waiting = threading.Thread(target=lambda: heard.append(table.drain(30.0)))
    waiting.start()
    table.abort([one])
    table.drop([one, other])
    waiting.join(30.0)
    assert heard == [True]
    assert sent.aborted == ["one"]
