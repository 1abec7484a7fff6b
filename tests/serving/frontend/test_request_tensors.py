"""A Triton request's tensors and parameters, combined and checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.serving.frontend.request_tensors import LlmRequest, llm_request
from engine.serving.link import protocol
from engine.types import RequestError, SamplingParams

OUTPUTS = frozenset({protocol.TOKEN_IDS})


def decoded(json: bytes, parameters: dict[str, Any] | None = None, timeout_us: int = 0, **more: Any) -> LlmRequest:
    tensors = {
        protocol.INPUT_IDS: np.array([1, 2, 3], np.int32),
        protocol.SAMPLING_PARAMETERS: np.array([json], np.object_),
        **{name: np.array([value]) for name, value in more.items()},
    }
    return llm_request(tensors, parameters or {}, OUTPUTS, timeout_us)


def test_the_same_json_again_means_the_same() -> None:
    first, again = decoded(b'{"max_tokens": 5, "seed": 3}'), decoded(b'{"max_tokens": 5, "seed": 3}')
    assert first.params == again.params
    assert (again.params.max_tokens, again.params.seed, list(again.input_ids or ())) == (5, 3, [1, 2, 3])


def test_what_comes_besides_a_json_counts_each_time() -> None:
    json = b'{"max_tokens": 5}'
    assert decoded(json).params.temperature == 1.0
    assert decoded(json, temperature=np.float32(0.5)).params.temperature == 0.5
    assert decoded(json, {"temperature": 0.25}).params.temperature == 0.25
    assert decoded(json, timeout_us=2_000_000).params.timeout_s == 2.0
    assert decoded(json, {"timeout": 3_000_000}).params.timeout_s == 3.0, "as HTTP's generate endpoint hands it on"
    assert decoded(json, {"timeout": 0}).params.timeout_s is None
    assert decoded(json, end_id=np.int32(7)).params.stop_token_ids == (7,)
    assert decoded(json).params == decoded(b'{"max_tokens":5}').params


@pytest.mark.parametrize("given", ["5", -1, 0.5, True])
def test_a_timeout_that_is_no_number_of_microseconds_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="timeout must be a number of microseconds, not"):
        decoded(b"{}", {"timeout": given})


def test_the_tensor_wins_over_request_parameters() -> None:
    """vllm_backend's client.py sends the same fields both ways, all of them strings."""
    fields = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
    json = b'{"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}'
    assert decoded(json, fields).params == decoded(json).params
    params = decoded(json, {"temperature": "0.9", "max_completion_tokens": 7, "min_p": 0.5}).params
    assert (params.temperature, params.max_tokens, params.min_p) == (0.1, 100, 0.5)
    assert decoded(b"{}", {"temperature": 0.9}, temperature=np.float32(0.25)).params.temperature == 0.25


def test_the_json_wins_over_a_tensor_of_the_same_field() -> None:
    """HTTP's generate endpoint makes tensors of request parameters with a tensor's name."""
    json = b'{"temperature": "0.1", "max_completion_tokens": 100, "stop": "a", "bad_words": ["b", "c"], "top_p": 0.5}'
    numbers: dict[str, Any] = {"temperature": np.float32(0.9), "max_tokens": np.int32(7), "top_p": np.float32(0.0)}
    assert decoded(json, **numbers).params == decoded(json).params
    words = {"stop_words": np.array([b"x"], np.object_), "bad_words": np.array([b"y"], np.object_)}
    tensors = {protocol.INPUT_IDS: np.array([1], np.int32), protocol.SAMPLING_PARAMETERS: np.array([json], np.object_)}
    assert llm_request({**tensors, **words}, {}, OUTPUTS).params == decoded(json).params
    assert decoded(b'{"max_tokens": 5}', **numbers).params.temperature == np.float64(0.9)


def test_top_p_of_0_is_not_set_in_tensorrt_llms_tensor() -> None:
    """inflight_batcher_llm_client.py sends it with top_k 1. Without a top_k TensorRT-LLM is greedy then."""
    zero = np.float32(0.0)
    assert (decoded(b"{}", top_p=zero, top_k=np.int32(5)).params.top_p, SamplingParams().top_p) == (1.0, 1.0)
    assert decoded(b"{}", top_p=zero, top_k=np.int32(5)).params.top_k == 5
    assert decoded(b"{}", top_p=zero, top_k=np.int32(0)).params.top_k == 1
    assert decoded(b"{}", top_p=zero).params.top_k == 1
    assert decoded(b"{}", top_p=np.float32(0.5)).params.top_p == 0.5
    with pytest.raises(RequestError, match="top_p"):
        decoded(b'{"top_p": 0.0}')
    with pytest.raises(RequestError, match="top_p"):
        decoded(b"{}", top_p=np.float32(-1.0))


def test_streaming_as_a_request_parameter_is_taken_where_it_asks_for_nothing() -> None:
    """inflight_batcher_llm_client.py sends it false with a unary call."""
    assert decoded(b"{}", {"Streaming": False}).params == decoded(b"{}").params
    with pytest.raises(RequestError, match="unknown sampling parameter 'Streaming'"):
        decoded(b"{}", {"Streaming": True})


def test_empty_stop_words_and_bad_words_of_tensorrt_llm_say_nothing() -> None:
    empty = np.array([b""], np.object_)
    tensors = {protocol.INPUT_IDS: np.array([1], np.int32), protocol.STOP_WORDS: empty, "bad_words": empty}
    params = llm_request(tensors, {}, OUTPUTS).params
    assert (params.stop, params.bad_words) == ((), ())
    with pytest.raises(RequestError, match=r"stop cannot contain an empty string\."):
        decoded(b'{"stop": ""}')


def test_a_streamed_echo_is_refused_of_text_alone() -> None:
    """TensorRT-LLM's clients send exclude_input_in_output false with every stream, and get new tokens only."""
    flags = {protocol.STREAM: np.array([True]), protocol.EXCLUDE_INPUT: np.array([False])}
    by_ids = llm_request({protocol.INPUT_IDS: np.array([1], np.int32), **flags}, {}, OUTPUTS)
    assert (by_ids.stream, by_ids.echo) == (True, False)
    text = {protocol.TEXT_INPUT: np.array([b"a"], np.object_), **flags}
    by_text = llm_request(text, {}, OUTPUTS, batched=True)
    assert (by_text.stream, by_text.echo) == (True, False)
    with pytest.raises(RequestError, match=protocol.STREAM_ECHO_REFUSAL):
        llm_request(text, {}, OUTPUTS)


def test_a_wrong_json_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="unknown sampling parameter 'max_token'"):
            decoded(b'{"max_token": 5}')


def test_what_may_only_be_neutral_is_refused_beside_a_known_json() -> None:
    decoded(b"{}", return_context_logits=np.bool_(False))
    with pytest.raises(RequestError, match="logits never leave"):
        decoded(b"{}", return_context_logits=np.bool_(True))


def test_the_request_by_which_tensorrt_llm_stops_another_is_refused_as_that() -> None:
    lengths, stop = np.array([0], np.int32), np.array([True])
    tensors = {protocol.INPUT_IDS: np.array([7], np.int32), protocol.INPUT_LENGTHS: lengths, "stop_request": stop}
    with pytest.raises(RequestError, match="cancel the call of the other"):
        llm_request(tensors, {}, OUTPUTS)


def test_a_beam_search_gives_its_answers_at_its_end() -> None:
    asked = decoded(b"{}", beam_width=np.int32(3), stream=np.bool_(True))
    assert (asked.stream, asked.echo, asked.n, asked.best_of) == (False, False, 3, 3)
    fewer = decoded(b"{}", beam_width=np.int32(3), num_return_sequences=np.int32(2))
    assert (fewer.n, fewer.best_of, fewer.separate) == (2, 3, True)
    with pytest.raises(RequestError, match=r"beam_width \(3\) must be at least the number of answers \(4\)"):
        decoded(b"{}", beam_width=np.int32(3), num_return_sequences=np.int32(4))
