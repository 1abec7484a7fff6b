"""The engine as a library, with its loop on a thread: what a caller can rely on."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from engine.api import Engine
from engine.types import ErrorCode, FinishReason, RequestError, RequestInput, SamplingParams, TokenEvent, rejection
from tests.core.harness import continuation, make_config, make_request
from tests.core.scripted_runner import ScriptedRunner, pool

PROMPT = [5, 6, 7, 8, 9]


class Sink:
    """Keeps events and signals the end of `count` requests."""

    def __init__(self, count: int = 1) -> None:
        self.events: list[TokenEvent] = []
        self._open = count
        self.started = threading.Event()
        self.ended = threading.Event()

    def deliver(self, events: list[TokenEvent]) -> None:
        self.events += events
        self.started.set()
        self._open -= sum(event.finish_reason is not None for event in events)
        if self._open <= 0:
            self.ended.set()

    def end(self) -> TokenEvent:
        assert self.ended.wait(10)
        (event,) = [event for event in self.events if event.finish_reason is not None]
        return event


@pytest.mark.parametrize("overlap", [True, False])
def test_generates_what_the_model_says(overlap: bool) -> None:
    runner = ScriptedRunner(pool())
    engine = Engine(runner, make_config(overlap=overlap)).start()
    inputs = [make_request(str(i), range(2, 3 + 3 * i)) for i in range(6)]
    for input, got in zip(inputs, engine.generate(inputs), strict=True):
        assert got.token_ids == continuation(runner, input.prompt_ids, 8)
        assert got.finish_reason is FinishReason.LENGTH
    engine.check_integrity()
    engine.close()
    engine.close()
    assert runner.closed
    assert engine.failure is None


def test_the_control_side_imports_no_torch() -> None:
    code = "import sys, engine.api; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("r", []), "the prompt is empty"),
        (make_request("r", [5] * 200), "the prompt has 200 tokens, but the context holds 100 tokens"),
        (make_request("r", [5, 50]), "prompt_ids holds the token id 50; ids go from 0 to 49"),
        (make_request("r", [-1]), "prompt_ids holds the token id -1"),
        (make_request("r", [5], [60]), "output_ids holds the token id 60"),
        (make_request("r", [5], [6, 7], max_tokens=1), "output_ids holds 2 tokens, more than max_tokens"),
        (make_request("r", [5], stop_token_ids=(99,)), "stop_token_ids holds the token id 99"),
        (make_request("r", [5], logit_bias={77: 1.0}), "logit_bias holds the token id 77"),
        (make_request("r", [5], allowed_token_ids=(51,)), "allowed_token_ids holds the token id 51"),
        (
            RequestInput(request_id="r", prompt_ids=[5], params=SamplingParams(), bad_word_ids=[[5, 70]]),
            "bad_word_ids holds the token id 70",
        ),
        (
            RequestInput(request_id="r", prompt_ids=[5], params=SamplingParams(), bad_word_ids=[[5] * 600, [6] * 600]),
            "bad_words: they are 1200 tokens, .* at most 1024 are allowed",
        ),
        (
            make_request("r", [5], allowed_token_ids=(3, 2), stop_token_ids=(2, 3, 4), min_tokens=1),
            r"allowed_token_ids: every one of them ends the request, and min_tokens \(1\) forbids that",
        ),
        (
            RequestInput(
                request_id="r", prompt_ids=[5], params=SamplingParams(allowed_token_ids=(3,)), bad_word_ids=[[3], [4]]
            ),
            "allowed_token_ids: bad_words bans every one of them",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(request_: RequestInput, message: str) -> None:
    engine = Engine(ScriptedRunner(pool(), max_model_len=100), make_config())
    with pytest.raises(RequestError, match=message) as refusal:
        engine.submit(request_, Sink())
    assert refusal.value.code is ErrorCode.INVALID_ARG
    event = rejection("r", refusal.value)
    assert (event.finish_reason, event.error) == (FinishReason.REJECTED, refusal.value.message)
    engine.close()


def test_a_prompt_larger_than_the_pool_is_refused_and_the_largest_that_fits_is_served() -> None:
    runner = ScriptedRunner(pool(6, 4))
    engine = Engine(runner, make_config()).start()
    with pytest.raises(RequestError, match=r"the prompt has 21 tokens, but .* the KV pool 20, .* at most 20 can"):
        engine.generate([make_request("r", [5] * 21)])
    (got,) = engine.generate([make_request("r", [5] * 20)])
    assert (got.token_ids, got.finish_reason) == (continuation(runner, [5] * 20, 1), FinishReason.LENGTH)
    engine.close()


def test_a_full_context_ends_a_request_for_length() -> None:
    runner = ScriptedRunner(pool(), max_model_len=8)
    engine = Engine(runner, make_config()).start()
    (got,) = engine.generate([make_request("r", PROMPT, max_tokens=100)])
    assert (got.token_ids, got.finish_reason) == (continuation(runner, PROMPT, 3), FinishReason.LENGTH)
    engine.close()


def test_a_full_queue_refuses_with_its_size() -> None:
    engine = Engine(ScriptedRunner(pool()), make_config(max_waiting=2))
    for i in range(2):
        engine.submit(make_request(str(i), PROMPT), Sink())
    with pytest.raises(RequestError, match="the queue is full: 2 requests wait and 2 may") as refusal:
        engine.submit(make_request("2", PROMPT), Sink())
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    engine.close()


def test_an_id_that_is_alive_is_refused_and_one_that_ended_can_be_used_again() -> None:
    engine = Engine(ScriptedRunner(pool()), make_config())
    engine.submit(make_request("a", PROMPT), Sink())
    with pytest.raises(RequestError, match="'a' is already running"):
        engine.submit(make_request("a", PROMPT), Sink())
    engine.start()
    assert engine.drain(10)
    engine.close()

    engine = Engine(ScriptedRunner(pool()), make_config()).start()
    for _ in range(2):
        assert engine.generate([make_request("a", PROMPT)])[0].finish_reason is FinishReason.LENGTH
    engine.close()


def test_a_request_without_a_seed_is_given_one() -> None:
    runner = ScriptedRunner(pool())
    engine = Engine(runner, make_config()).start()
    engine.generate([make_request(str(i), PROMPT) for i in range(2)])
    seeds = {start.params.seed for plan in runner.plans for start in plan.starts}
    assert len(seeds) == 2
    assert None not in seeds
    engine.close()


def test_abort_ends_a_stream() -> None:
    engine = Engine(ScriptedRunner(pool(4000)), make_config()).start()
    sink = Sink()
    engine.submit(make_request("a", PROMPT, max_tokens=10_000), sink)
    assert sink.started.wait(10)
    engine.abort("a")
    assert sink.end().finish_reason is FinishReason.CANCELLED
    assert engine.drain(10)
    assert engine.stats().groups[0].used == 0
    engine.close()


def test_drain_lets_requests_end_and_takes_no_new_ones() -> None:
    engine = Engine(ScriptedRunner(pool()), make_config()).start()
    sink = Sink()
    engine.submit(make_request("a", PROMPT, max_tokens=50), sink)
    assert engine.drain(10)
    assert sink.end().finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestError, match="shutting down") as refusal:
        engine.submit(make_request("b", PROMPT), Sink())
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    engine.close()


def test_drain_gives_up_after_its_timeout() -> None:
    engine = Engine(ScriptedRunner(pool()), make_config())
    engine.submit(make_request("a", PROMPT), Sink())
    assert not engine.drain(0.01)
    engine.close()


def test_close_ends_what_is_alive() -> None:
    engine = Engine(ScriptedRunner(pool(4000)), make_config(max_rows=1)).start()
    running, waiting = Sink(), Sink()
    engine.submit(make_request("a", PROMPT, max_tokens=10_000), running)
    engine.submit(make_request("b", PROMPT, max_tokens=10_000), waiting)
    assert running.started.wait(10)
    engine.close()
    for sink in (running, waiting):
        assert sink.end().finish_reason is FinishReason.CANCELLED
        assert sink.end().error == "the engine is shutting down"
    engine.check_integrity()


def test_close_ends_what_was_submitted_to_an_engine_that_never_started() -> None:
    engine = Engine(ScriptedRunner(pool()), make_config())
    sink = Sink()
    engine.submit(make_request("a", PROMPT), sink)
    engine.close()
    assert sink.end().finish_reason is FinishReason.CANCELLED


def test_a_runner_that_fails_ends_every_request_with_an_error_and_the_engine_with_them() -> None:
    failures: list[BaseException] = []
    engine = Engine(ScriptedRunner(pool(), fail_step=3), make_config(max_rows=1), on_failure=failures.append)
    sinks = [Sink(), Sink()]
    for i, sink in enumerate(sinks):
        engine.submit(make_request(str(i), PROMPT), sink)
    engine.start()
    for sink in sinks:
        end = sink.end()
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)
        assert end.error == "the engine failed: RuntimeError: the device is gone"
    with pytest.raises(RequestError, match="the engine has failed and takes no new requests") as refusal:
        engine.submit(make_request("late", PROMPT), Sink())
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    engine.close()
    assert [str(failure) for failure in failures] == ["the device is gone"]
    assert engine.failure is failures[0]


def test_an_idle_engine_sleeps() -> None:
    """Nothing to do: the loop's thread waits for a signal instead of turning."""
    engine = Engine(ScriptedRunner(pool()), make_config()).start()
    engine.generate([make_request("a", PROMPT)])
    turns = 0
    iterate = engine.loop.iterate

    def counted(inflight):  # type: ignore[no-untyped-def]
        nonlocal turns
        turns += 1
        return iterate(inflight)

    engine.loop.iterate = counted  # type: ignore[method-assign]
    threading.Event().wait(0.1)
    assert turns <= 1
    engine.generate([make_request("b", PROMPT)])
    assert turns > 1
    engine.close()


def test_many_threads_submit_and_abort() -> None:
    runner = ScriptedRunner(pool(200))
    engine = Engine(runner, make_config()).start()

    def client(number: int) -> None:
        for i in range(5):
            sink = Sink()
            name = f"{number}.{i}"
            engine.submit(make_request(name, [2 + number, 3, 4], max_tokens=6), sink)
            if i % 2:
                engine.abort(name)
            end = sink.end()
            tokens = [token for event in sink.events for token in event.token_ids]
            assert tokens == continuation(runner, [2 + number, 3, 4], len(tokens))
            assert (end.finish_reason is FinishReason.LENGTH) == (len(tokens) == 6)
            done.append(name)

    done: list[str] = []
    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(done) == 40
    assert engine.drain(10)
    engine.check_integrity()
    engine.close()
