"""A frontend, the link, the supervisor and a real engine process: deaths, hangs, failures, cancellations.

The engine process runs the real host and engine over a scripted runner, so that a start takes no second.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.serving.frontend.settings import FrontendConfig
from engine.serving.host.host import Host
from engine.serving.link.process_watch import start_time
from engine.serving.link.run_folder import RunFolder
from engine.text import Tokenizer
from tests.serving import scripted_host, stub
from tests.serving.rig import LONG, Rig
from tests.serving.stub import Request, tokens_of


def test_streams_survive_the_engines_death_without_a_lost_or_a_repeated_token(rig: Callable[..., Rig]) -> None:
    running = rig()
    expected = [tokens_of(running.submit(seed).all()) for seed in range(4)]
    requests = [running.submit(seed) for seed in range(4)]
    firsts = [request.next() for request in requests]
    before = running.engine_pid()
    running.kill()
    got = [tokens_of([first, *request.all()]) for first, request in zip(firsts, requests, strict=True)]
    assert got == expected
    assert running.engine_pid() != before


def test_hand_overs_change_no_token(rig: Callable[..., Rig]) -> None:
    """With `direct` off every response goes through a sender's thread, and every request through an intake's."""
    got = []
    for direct in (True, False):
        running = rig(direct=direct)
        requests = [running.submit(seed) for seed in range(7)]
        got.append([tokens_of(request.all()) for request in requests])
        assert running.frontend.drain(10)
        running.close()
    assert got[0] == got[1]
    assert all(len(tokens) == 120 for tokens in got[0])


@pytest.mark.parametrize("direct", [True, False])
def test_a_frontend_that_falls_behind_puts_tokens_together(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Sends that take longer than steps: fewer responses, the same tokens, in order."""
    running = rig(direct=direct)
    expected = tokens_of(running.submit().all())
    send = Request.send

    def slow(self: Request, response: stub.Response, flags: int = 0) -> None:
        time.sleep(0.05)
        send(self, response, flags)

    monkeypatch.setattr(Request, "send", slow)
    responses = running.submit().all()
    assert tokens_of(responses) == expected
    assert len(responses) < len(expected) / 2
    assert max(len(response.tensors["token_ids"]) for response in responses) > 1


def test_short_requests_are_taken_in_at_once_and_long_texts_elsewhere(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = rig()
    threads: list[str] = []
    encode = running.tokenizer.encode

    def noted(text: bytes) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text)

    monkeypatch.setattr(running.tokenizer, "encode", noted)
    for text in (b"short", b"long " * 1000):
        request = Request(parameters={"max_tokens": 2, "temperature": 0}, text_input=text, stream=True)
        running.frontend.submit(request)
        request.all()
    assert threads == [threading.current_thread().name, "nereid-intake"]


def test_a_failed_loop_is_an_engine_death_too(rig: Callable[..., Rig]) -> None:
    """The runner dies after 70 steps: the request goes on in the next engine process."""
    running = rig("failing", restart_limit=20)
    assert len(tokens_of(running.submit().all())) == 120


def test_streams_survive_an_engine_process_that_fails_as_nobody_foresaw(rig: Callable[..., Rig]) -> None:
    """It ended them, as one that is told to end does."""
    running = rig()
    expected = tokens_of(running.submit().all())
    request = running.submit()
    first = request.next()
    state = running.folder.read_state()
    assert state is not None
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(running.folder.engine_socket(state.epoch))
        stranger.sendall(b"\1\0\0\0\xc1")
        assert tokens_of([first, *request.all()]) == expected


def test_an_engine_that_hangs_is_killed_and_replaced(rig: Callable[..., Rig]) -> None:
    running = rig(hang_timeout_s=0.6)
    request = running.submit()
    first = request.next()
    running.kill(signal.SIGSTOP)
    assert len(tokens_of([first, *request.all()])) == 120


def test_a_pause_of_all_processes_is_no_hang(rig: Callable[..., Rig]) -> None:
    """As when a container is paused: the engine was killed for a silence that nobody could have broken."""
    running = rig(hang_timeout_s=1.5)
    engine, request = running.engine_pid(), running.submit()
    own = os.getpid()
    paused = f"kill -STOP {engine} {own}; sleep 1.7; kill -CONT {own}; sleep 0.3; kill -CONT {engine}"
    with subprocess.Popen(["sh", "-c", paused]):
        assert len(tokens_of(request.all())) == 120
    assert running.engine_pid() == engine


def test_a_frontend_knows_when_requests_would_wait_for_the_engine(rig: Callable[..., Rig]) -> None:
    running = rig()
    assert running.engine.problem == ""
    running.kill(signal.SIGSTOP)
    while not running.engine.problem:
        time.sleep(0.01)
    assert "has said nothing for" in running.engine.problem
    request = Request(describe=True)
    running.frontend.submit(request)
    (described,) = request.all()
    assert "has said nothing for" in json.loads(described.tensors["description"][0])["problem"]
    running.kill(signal.SIGCONT)
    while running.engine.problem:
        time.sleep(0.01)
    assert len(tokens_of(running.submit().all())) == 120


def test_an_engine_that_is_late_to_come_back_is_a_problem(rig: Callable[..., Rig]) -> None:
    engine = rig().engine
    engine.heard, engine.lost = None, time.monotonic()
    assert engine.problem == "", "most are back within a second"
    engine.lost -= 5.0
    assert "the next one is not there yet" in engine.problem
    engine.failed = "killed by SIGKILL"
    assert engine.problem == "killed by SIGKILL"


def test_when_it_cannot_come_back_every_stream_ends_and_new_ones_are_refused(rig: Callable[..., Rig]) -> None:
    running = rig(restart_limit=0)
    gave_up: list[bool] = []
    running.frontend.on_give_up = lambda: gave_up.append(True)
    requests = [running.submit(seed, stream=seed % 2 == 0) for seed in range(4)]
    requests[0].next()
    running.kill()
    killed = time.monotonic()
    for request in requests:
        with pytest.raises(stub.Error, match="killed by SIGKILL") as caught:
            request.all()
        assert caught.value.code == stub.Error.UNAVAILABLE
    assert time.monotonic() - killed < 10.0  # nobody waits for another engine
    with pytest.raises(stub.Error, match="the engine process of model 'm' is not there"):
        running.submit().all()
    assert gave_up == [True]


def test_with_vllm_backends_health_check_they_hear_its_sentence_and_the_model_is_down_before(
    rig: Callable[..., Rig],
) -> None:
    running = rig(restart_limit=0, vllm_health_check=True)
    request = running.submit()
    request.next()
    told_before: list[int] = []
    running.frontend.on_give_up = lambda: told_before.append(request.finals)
    running.kill()
    with pytest.raises(stub.Error, match=r"^Model is unavailable due to unhealthy vLLM engine$"):
        request.all()
    assert told_before == [0]


def test_a_model_that_does_not_load_says_why(rig: Callable[..., Rig]) -> None:
    running = rig("broken")
    assert running.engine.failed == "the script says that this model does not load"


def test_only_so_many_requests_wait_for_a_restart(rig: Callable[..., Rig]) -> None:
    running = rig()
    running.kill(signal.SIGSTOP)
    before = running.engine_pid()
    running.kill()
    while running.engine.ready.is_set():
        time.sleep(0.002)
    requests = [running.submit(seed) for seed in range(8)]
    ends = [outcome(request) for request in requests]
    refusals = [end for end in ends if isinstance(end, str)]
    assert all("it is being restarted and 4 requests wait for it already" in refusal for refusal in refusals)
    assert refusals
    assert ends.count(120) >= 4
    assert running.engine_pid() != before


def test_cancelled_stream_ends_and_the_engine_is_told(rig: Callable[..., Rig]) -> None:
    running = rig()
    request = running.submit()
    request.next()
    request.cancelled = True
    with pytest.raises(stub.Error) as caught:
        request.all()
    assert caught.value.code == stub.Error.CANCELLED
    assert running.frontend.drain(5.0)
    said = [line.rpartition(" ")[0] for line in running.log]
    assert said == ["[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"], "as vllm_backend"
    deadline = time.monotonic() + 10
    while stub.MetricFamily.made["vllm:num_requests_running:m:m:0:1"].value and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stub.MetricFamily.made["vllm:kv_cache_blocks_used:m:m:0:1"].value == 0


def several(running: Rig, stream: bool) -> Request:
    request = Request(parameters={**LONG, "n": 3}, input_ids=[2, 3, 4], stream=stream)
    running.frontend.submit(request)
    return request


def test_all_answers_of_a_request_survive_the_engines_death(rig: Callable[..., Rig]) -> None:
    running = rig()
    (expected,) = several(running, stream=False).all()
    assert len(expected.tensors["text_output"]) == 3
    assert len(expected.tensors["token_ids"]) == 3 * LONG["max_tokens"]
    watched, whole = several(running, stream=True), several(running, stream=False)
    first = watched.next()
    running.kill()
    assert tokens_of(whole.all()) == tokens_of([expected])
    assert sorted(tokens_of([first, *watched.all()])) == sorted(tokens_of([expected]))
    assert running.frontend.drain(5.0)


def test_a_cancellation_ends_all_answers_of_a_request(rig: Callable[..., Rig]) -> None:
    running = rig()
    request = several(running, stream=True)
    request.next()
    request.cancelled = True
    with pytest.raises(stub.Error) as caught:
        request.all()
    assert caught.value.code == stub.Error.CANCELLED
    assert request.finals == 1
    assert running.frontend.drain(5.0)
    assert tokens_of(running.submit().all())


def test_of_a_request_that_has_ended_nothing_of_the_server_is_kept(rig: Callable[..., Rig]) -> None:
    """What the interpreter finds at its end, behind the server's memory, ends the stub by a segfault."""
    running = rig()
    gc.disable()
    try:
        requests = [running.submit(), several(running, stream=True), several(running, stream=False)]
        left = [weakref.ref(request) for request in requests]
        while requests:
            requests.pop().all()
        assert running.frontend.drain(5.0)
        deadline = time.monotonic() + 10
        while any(request() for request in left) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [request() for request in left] == [None] * 3
    finally:
        gc.enable()


class Unreachable(Request):
    """Of a client that nothing can be sent to, as when shared memory is full."""

    def send(self, response: object, flags: int = 0) -> None:
        raise MemoryError("no room for a response")

    def is_cancelled(self) -> bool:
        raise MemoryError("no room for a question")


@pytest.mark.parametrize("direct", [True, False])
def test_a_client_that_nothing_can_be_sent_to_harms_no_other(rig: Callable[..., Rig], direct: bool) -> None:
    """What failed ended the thread that sent, or that listens to the engine, or that asks for clients."""
    running = rig(direct=direct, senders=1)
    for fields in (LONG, {**LONG, "max_tokens": 0}):
        running.frontend.submit(Unreachable(parameters=fields, input_ids=[2, 3, 4], stream=True))
    assert len(tokens_of(running.submit().all())) == 120
    request = timed(running)
    with pytest.raises(stub.Error, match="ran past its timeout"):
        request.all()
    assert running.frontend.drain(5.0)


def timed(running: Rig, **tensors: object) -> Request:
    """A request with a second to live, of more tokens than that is enough for."""
    parameters = {**LONG, "max_tokens": 2000, "timeout_s": 1.0}
    request = Request(parameters=parameters, stream=True, **(tensors or {"input_ids": [2, 3, 4]}))
    running.frontend.submit(request)
    return request


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_timeout_holds_while_the_engine_hangs_or_is_started_again(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("engine.serving.frontend.supervisor._BACKOFF_S", (30.0,))
    running = rig()
    request = timed(running)
    first = request.next()
    running.kill(number)
    try:
        with pytest.raises(stub.Error, match=r"ran past its timeout of 1 s with \d+ tokens generated") as caught:
            tokens_of([first, *request.all()])
        assert caught.value.code == stub.Error.UNAVAILABLE
        assert running.frontend.drain(5.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()


@pytest.mark.parametrize("size", [10, 10_000])
def test_a_timeout_holds_while_texts_are_tokenized(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Also of a request that waits for one in front of it to be tokenized. The engine never hears of either."""
    running = rig(direct=False)
    done = threading.Event()
    monkeypatch.setattr(running.tokenizer, "encode", lambda text: done.wait(30) and [2, 3])
    requests = [timed(running, text_input=b"x" * size) for _ in range(5)]
    for request in requests:
        with pytest.raises(stub.Error, match="ran past its timeout of 1 s with 0 tokens generated"):
            request.all()
    assert running.frontend.drain(5.0)
    done.set()
    monkeypatch.undo()
    assert len(tokens_of(running.submit().all())) == 120


def test_a_client_that_goes_while_its_text_is_tokenized_is_noticed(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = rig(direct=False)
    done = threading.Event()
    monkeypatch.setattr(running.tokenizer, "encode", lambda text: done.wait(30) and [2, 3])
    request = Request(parameters=LONG, text_input=b"x", stream=True)
    running.frontend.submit(request)
    request.cancelled = True
    with pytest.raises(stub.Error) as caught:
        request.all()
    assert caught.value.code == stub.Error.CANCELLED
    done.set()


def test_what_nobody_foresaw_is_told_by_an_id_that_the_log_has(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = rig()

    def fail(text: bytes) -> list[int]:
        raise ZeroDivisionError("in /srv/secret")

    monkeypatch.setattr(running.tokenizer, "encode", fail)
    request = Request(parameters=LONG, text_input=b"x")
    running.frontend.submit(request)
    with pytest.raises(stub.Error, match="its log says why under the id") as caught:
        request.all()
    assert caught.value.code == stub.Error.INTERNAL
    assert "secret" not in str(caught.value)
    assert "ZeroDivisionError: in /srv/secret" in caplog.text
    assert str(caught.value).rsplit(" ", 1)[1] in caplog.text


def test_leaving_last_closes_the_engine_and_removes_the_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    running = Rig(tmp_path, tokenizer, "fine", FrontendConfig())
    assert running.engine.ready.wait(30)
    engine = running.engine_pid()
    running.close()
    assert start_time(engine) is None
    assert not running.folder.server_folder.exists()


def test_the_model_says_what_it_can_hold(rig: Callable[..., Rig]) -> None:
    """The engine's own number: the script has 10,000 positions, but a pool of 512 blocks."""
    model = rig()
    request = Request(describe=True)
    model.frontend.submit(request)
    (response,) = request.all()
    found = json.loads(response.tensors["description"][0])
    assert found == {"max_model_len": 511 * 4 + 1, "problem": ""}
    mixed = Request(describe=True, text_input=b"a")
    model.frontend.submit(mixed)
    assert "text_input" in str(outcome(mixed))


def test_the_prefix_cache_is_empty_once_the_engine_says_so(rig: Callable[..., Rig]) -> None:
    model = rig()

    def reset() -> object:
        request = Request(reset_prefix_cache=True)
        model.frontend.submit(request)
        (response,) = request.all()
        return json.loads(response.tensors["description"][0])

    assert tokens_of(model.submit().all()) == tokens_of(model.submit().all())
    assert reset() == reset() == {"prefix_cache": "empty"}
    model.kill()
    assert reset() == {"prefix_cache": "empty"}  # of the engine that was killed or of the next
    mixed = Request(reset_prefix_cache=True, text_input=b"a")
    model.frontend.submit(mixed)
    assert "reset_prefix_cache stands alone" in str(outcome(mixed))


def outcome(request: Request) -> int | str:
    """How many tokens came, or the error."""
    try:
        return len(tokens_of(request.all()))
    except stub.Error as error:
        return str(error)


def test_an_engine_process_whose_frontends_have_all_died_ends_and_leaves_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, os.getpid(), "model")
    folder.path.mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (folder.path / f"frontend-{gone.pid}").touch()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert Host(folder, 1, "m", EngineConfig(model="fine"), scripted_host.build, no_frontend_s=0.3).run() == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not folder.path.exists()
