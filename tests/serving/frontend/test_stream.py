"""A stream turns engine events into responses: text, stop strings, counts, and what is sent again after a restart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.demo.make import make
from engine.serving.frontend.request_tensors import LlmRequest, Wanted
from engine.serving.frontend.responses import perf_metrics
from engine.serving.frontend.stream import Piece, Stream, now
from engine.serving.link import protocol
from engine.text import LARGE_TEXT, Tokenizer
from engine.types import ErrorCode, FinishReason, RequestError, SamplingParams, TokenEvent, TokenLogprobs, Usage

TEXT = "A server takes a question and gives an answer, and the answer is short."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("checkpoint")
    make(folder)
    return Tokenizer.from_folder(folder)


def stream_of(tokenizer: Tokenizer, params: SamplingParams, stream: bool = True, text: bool = True) -> Stream:
    request = LlmRequest(b"x", None, stream, not stream, params, Wanted(text=text), None)
    timeout_s = params.timeout_s or 3600.0
    made = Stream("r", 1, None, request, 7, timeout_s, tokenizer, arrived=0.0)
    made.tokenize(0)
    return made


def test_a_text_that_can_only_be_too_long_is_not_tokenized(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=4)
    request = LlmRequest(b"a" * (2 * LARGE_TEXT), None, True, False, params, Wanted(text=True), None)
    long = Stream("r", 1, None, request, 7, 60.0, tokenizer, arrived=0.0)
    with pytest.raises(RequestError, match=r"of 2097152 bytes has \d+ tokens or more, but at most 511 can be served"):
        long.tokenize(512)
    long.tokenize(2 * LARGE_TEXT)
    assert len(long.prompt_ids) >= tokenizer.least_tokens(2 * LARGE_TEXT)


def event(ids: list[int], reason: FinishReason | None = None, **fields: object) -> TokenEvent:
    return msgspec.structs.replace(TokenEvent("r", ids, finish_reason=reason), **fields)


def run(stream: Stream, events: list[TokenEvent], interval: int = 1) -> tuple[list[Piece], bool]:
    """(pieces sent, whether the engine was told to stop) when the sender keeps up."""
    pieces, stopped = [], False
    for item in events:
        if stream.receive(item, interval):
            piece, stop = stream.take()
            stopped |= stop
            if piece is not None:
                pieces.append(piece)
                if piece.finish_reason is not None:
                    break
    return pieces, stopped


def single(ids: list[int], reason: FinishReason = FinishReason.LENGTH) -> list[TokenEvent]:
    return [*(event([i]) for i in ids[:-1]), event(ids[-1:], reason)]


def test_deltas_make_up_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    pieces, _ = run(stream_of(tokenizer, SamplingParams(max_tokens=99)), single(ids))
    assert len(pieces) == len(ids)
    assert "".join(p.text for p in pieces) == TEXT
    assert [p.finish_reason for p in pieces] == [None] * (len(ids) - 1) + [FinishReason.LENGTH]


def test_tokens_that_came_while_the_sender_was_busy_go_out_together(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    stream = stream_of(tokenizer, SamplingParams(max_tokens=99))
    for item in single(ids):
        stream.receive(item, 1)
    piece, _ = stream.take()
    assert piece is not None
    assert (piece.text, piece.token_ids, piece.finish_reason) == (TEXT, ids, FinishReason.LENGTH)
    assert stream.take() == (None, False)


def test_interval_sends_the_first_token_at_once_and_then_every_few(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)[:10]
    pieces, _ = run(stream_of(tokenizer, SamplingParams(max_tokens=99)), single(ids), interval=4)
    assert [len(p.token_ids) for p in pieces] == [1, 3, 4, 2]


def test_answer_that_is_not_streamed_is_one_piece(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    pieces, _ = run(stream_of(tokenizer, SamplingParams(max_tokens=99), stream=False), single(ids))
    assert [(p.text, p.token_ids) for p in pieces] == [(TEXT, ids)]


@given(cut=st.integers(1, len(TEXT) - 6), streamed=st.booleans(), batch=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_stop_string_ends_the_answer_before_it_and_stops_the_engine(
    tokenizer: Tokenizer, cut: int, streamed: bool, batch: int
) -> None:
    stop = TEXT[cut : cut + 5]
    ids = tokenizer.encode(TEXT)
    params = SamplingParams(max_tokens=99, stop=(stop,))
    groups = [ids[i : i + batch] for i in range(0, len(ids), batch)]
    pieces, stopped = run(stream_of(tokenizer, params, streamed), [event(group) for group in groups])
    assert stopped
    assert "".join(p.text for p in pieces) == TEXT[: TEXT.index(stop)]
    assert pieces[-1].finish_reason is FinishReason.STOP
    used = sum(len(p.token_ids) for p in pieces)
    assert stop in tokenizer.decode(ids[:used])
    assert stop not in tokenizer.decode(ids[: used - 1])


@pytest.mark.parametrize("streamed", [False, True])
def test_without_text_tokens_go_out_unread(tokenizer: Tokenizer, streamed: bool) -> None:
    ids = tokenizer.encode(TEXT)
    pieces, _ = run(stream_of(tokenizer, SamplingParams(max_tokens=99), streamed, text=False), single(ids))
    assert [i for p in pieces for i in p.token_ids] == ids
    assert {p.text for p in pieces} == {""}
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_without_text_a_stop_string_still_ends_the_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    params = SamplingParams(max_tokens=99, stop=("answer",))
    with_text, _ = run(stream_of(tokenizer, params), single(ids))
    without, stopped = run(stream_of(tokenizer, params, text=False), single(ids))
    assert stopped
    assert [p.token_ids for p in without] == [p.token_ids for p in with_text]
    assert without[-1].finish_reason is FinishReason.STOP


def test_text_that_was_held_back_for_a_stop_string_comes_with_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    params = SamplingParams(max_tokens=99, stop=(TEXT[-4:] + "!",))
    pieces, stopped = run(stream_of(tokenizer, params), single(ids))
    assert not stopped
    assert "".join(p.text for p in pieces) == TEXT


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens_text_is_left_out_unless_included(tokenizer: Tokenizer, include: bool) -> None:
    ids = tokenizer.encode(TEXT)
    params = SamplingParams(max_tokens=99, stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
    pieces, _ = run(stream_of(tokenizer, params), single(ids, FinishReason.STOP))
    expected = TEXT if include else tokenizer.decode(ids[:-1])
    assert "".join(p.text for p in pieces) == expected
    assert [i for p in pieces for i in p.token_ids] == ids


def test_cumulative_logprob_goes_on_over_an_engine_restart(tokenizer: Tokenizer) -> None:
    """The second engine counts from 0 again; the client's sum does not."""
    stream = stream_of(tokenizer, SamplingParams(max_tokens=99, logprobs=0))
    entry = TokenLogprobs([5], [-0.5], [1])
    first, _ = run(stream, [event([5], logprobs=[entry], cumulative_logprob=-0.5)])
    second, _ = run(stream, [event([5], FinishReason.LENGTH, logprobs=[entry], cumulative_logprob=-0.5)])
    assert [p.cumulative_logprob for p in [*first, *second]] == [-0.5, -1.0]


def test_request_is_sent_again_with_what_was_received(tokenizer: Tokenizer) -> None:
    stream = stream_of(tokenizer, SamplingParams(max_tokens=99))
    first = stream.engine_request()
    stream.receive(event([5, 6]), 1)
    again = stream.engine_request()
    assert (again.output_ids, again.prompt_ids) == ([5, 6], tokenizer.encode("x"))
    assert (again.params.max_tokens, again.params.seed) == (99, first.params.seed)
    assert again.params.seed is not None


def test_request_that_is_sent_again_has_the_rest_of_its_time(tokenizer: Tokenizer) -> None:
    stream = stream_of(tokenizer, SamplingParams(timeout_s=60.0))
    stream.arrived = now() - 45.0
    left = stream.engine_request().params.timeout_s
    assert left is not None
    assert 10.0 < left <= 15.0
    stream.arrived = now() - 90.0
    assert stream.engine_request().params.timeout_s == pytest.approx(0.001)


def test_failure_is_the_only_thing_a_piece_says(tokenizer: Tokenizer) -> None:
    stream = stream_of(tokenizer, SamplingParams(), stream=False)
    failed = event([], FinishReason.REJECTED, error="the queue is full", error_code=ErrorCode.UNAVAILABLE)
    ((piece,), _) = run(stream, [failed])
    assert (piece.error, piece.error_code) == ("the queue is full", ErrorCode.UNAVAILABLE)


def test_perf_metrics_of_answers_together(tokenizer: Tokenizer) -> None:
    first, second = (stream_of(tokenizer, SamplingParams(max_tokens=4)) for _ in range(2))
    first.arrived = second.arrived = 10.0
    for stream, usage, (scheduled, heard, last) in (
        (first, Usage(4, 2, 6, 3), (10.25, 10.5, 11.0)),
        (second, Usage(5, 3, 0, 0), (10.5, 11.0, 12.0)),
    ):
        run(stream, [event([5], FinishReason.LENGTH, usage=usage)])
        stream.waited, stream.first_heard, stream.heard = (0.0, heard - scheduled), heard, last
    found = perf_metrics([first, second])
    assert set(found) == {tensor.name for tensor in protocol.PERF_OUTPUTS}
    assert [value for name, value in found.items() if name.startswith("kv_cache")] == [4, 5, 9]
    moments = [value for name, value in found.items() if name.endswith("_time_ns")]
    assert moments == [10_000_000_000, 10_250_000_000, 10_500_000_000, 12_000_000_000]
    assert [found[n] for n in ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")] == [0.5, 3, 6]
    assert perf_metrics([stream_of(tokenizer, SamplingParams())])["acceptance_rate"] == 0.0
