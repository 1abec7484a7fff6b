"""Each wrong request fails alone, with a sentence that names what is wrong, while good streams go on beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from tests.e2e.harness import Call, Server, text_of, tokens_of

PROMPT = "A server takes a question and"
FIELDS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps(fields)}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing prompt": ({"stream": True}, "no prompt: send text_input"),
    "empty prompt": ({"text_input": ""}, "text_input is empty"),
    "both prompts": ({"text_input": "a", "input_ids": [1]}, "both text_input and input_ids"),
    "empty ids": ({"input_ids": []}, "input_ids is empty"),
    "an id that is no token": ({"input_ids": [1, 10**6]}, "1000000"),
    "a negative id": ({"input_ids": [-1]}, "-1"),
    "invalid utf-8": ({"text_input": b"abc\xff"}, "not valid UTF-8: byte 0xff at position 3"),
    "not json": ({**sampling(), "sampling_parameters": "{max_tokens: 3}"}, "sampling_parameters is not JSON"),
    "json but no object": ({**sampling(), "sampling_parameters": "[1]"}, "must be a JSON object"),
    "invalid utf-8 in the parameters": ({**sampling(), "sampling_parameters": b"{\xff}"}, "not valid UTF-8"),
    "deep json": ({**sampling(), "sampling_parameters": "[" * 100_000}, "sampling_parameters is not JSON"),
    "nan": ({**sampling(), "sampling_parameters": '{"temperature": NaN}'}, "NaN is not a JSON number"),
    "nan as a string": (sampling(temperature="nan"), "temperature"),
    "infinite": (sampling(presence_penalty="inf"), "presence_penalty"),
    "unknown field": (sampling(temprature=1), "unknown sampling parameter 'temprature'; did you mean temperature?"),
    "wrong type": (sampling(max_tokens="many"), "max_tokens"),
    "max_tokens 0": (sampling(max_tokens=0), "max_tokens: expected int >= 1, got 0"),
    "max_tokens negative": (sampling(max_tokens=-5), "max_tokens: expected int >= 1, got -5"),
    "temperature out of range": (sampling(temperature=-1), "temperature: expected float >= 0.0, got -1"),
    "top_p out of range": (sampling(top_p=1.5), "top_p: expected float <= 1.0, got 1.5"),
    "top_k out of range": (sampling(top_k=-2), "top_k"),
    "seed out of range": (sampling(seed=2**63), "seed"),
    "min above max": (sampling(max_tokens=2, min_tokens=3), "min_tokens (3) must not exceed max_tokens (2)"),
    "10,000 stop strings": (sampling(stop=[str(i) for i in range(10_000)]), "stop holds 10000 strings; at most 64"),
    "a huge stop string": (sampling(stop="x" * 10_000), "4096 bytes"),
    "stop that is no text": (sampling(stop=[1]), "stop must be a string or a list of strings"),
    "a logit bias for no token": (sampling(logit_bias={"99999999": 1}), "99999999"),
    "an infinite logit bias": (sampling(logit_bias={"5": 1e308}), "logit_bias values must lie between"),
    "huge bad words": (sampling(bad_words=["x" * 20_000] * 60), "bad_words: each must hold between 1 and 256 bytes"),
    "many allowed ids": (sampling(allowed_token_ids=list(range(5000))), "allowed_token_ids holds 5000 values"),
    "millions of fields": (sampling(allowed_token_ids=[5] * 1_000_000), "bytes are too many"),
    "nothing left to draw": (sampling(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1), "every one of them"),
    "a long name": (sampling(**{"x" * 100_000: 1}), "unknown sampling parameter 'xxxxx"),
    "a token id beyond 64 bits": (sampling(stop_token_ids=[10**30]), "out of range"),
    "too many answers": (sampling(n=10**6), "n must be a whole number from 1 to 128"),
    "best of fewer": (sampling(n=3, best_of=2), "must be at least n"),
    "beams and a draw": (sampling(use_beam_search=True, n=2, top_p=0.5), "top_p cannot be combined with beam search"),
    "too many beams": (sampling(beam_width=17), "beam_width: expected int <= 16, got 17"),
    "an adapter": (sampling(lora_name="x"), "LoRA feature is not enabled."),
    "a penalty without beams": ({"text_input": "a", "length_penalty": 2.0}, "length_penalty belongs to beam search"),
    "longer than the context": ({"input_ids": [5] * 9000}, "9000 tokens"),
    "longer than the pool": ({"input_ids": [5] * 2000}, "the KV pool"),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(server: Server) -> list[int]:
    return tokens_of(Call(server, **sampling(**FIELDS)).all())


@pytest.fixture(autouse=True)
def good_stream(server: Server, expected: list[int]) -> Iterator[None]:
    """A stream is under way while each test runs, and must come out as if it had been alone."""
    call = Call(server, **sampling(**FIELDS))
    first = call.next()
    yield
    assert tokens_of([first, *call.all()]) == expected


@pytest.mark.parametrize("name", BAD)
def test_bad_request_fails_alone(server: Server, name: str) -> None:
    tensors, sentence = BAD[name]
    with pytest.raises(InferenceServerException) as caught:
        Call(server, **tensors).all()
    assert sentence in str(caught.value)


def test_unknown_request_parameter_is_refused_by_name(server: Server) -> None:
    with pytest.raises(InferenceServerException, match="unknown sampling parameter 'top_q'"):
        Call(server, text_input=PROMPT, parameters={"top_q": 1}).all()


def wrong_dtype() -> InferInput:
    tensor = InferInput("text_input", [1], "INT32")
    tensor.set_data_from_numpy(np.array([1], dtype=np.int32))
    return tensor


def wrong_shape() -> InferInput:
    tensor = InferInput("text_input", [2], "BYTES")
    tensor.set_data_from_numpy(np.array([b"a", b"b"], dtype=np.object_))
    return tensor


@pytest.mark.parametrize(("make", "sentence"), [(wrong_dtype, "data-type"), (wrong_shape, "shape")])
def test_wrong_dtype_and_shape(server: Server, make: Callable[[], InferInput], sentence: str) -> None:
    with pytest.raises(InferenceServerException, match=sentence):
        Call(server, inputs=[make()]).all()


def test_errors_over_http_have_a_status_and_a_sentence(server: Server) -> None:
    status, body = server.post("/v2/models/demo/generate", b'{"text_input": "a", "max_tokens": 0}')
    assert status == 400
    assert "max_tokens: expected int >= 1, got 0" in json.loads(body)["error"]


def test_text_that_looks_like_a_special_token_is_served(server: Server) -> None:
    assert text_of(Call(server, text_input="<|im_end|>", stream=True, max_tokens=2).all()) is not None


def test_request_that_runs_past_its_timeout_ends_with_the_count(server: Server) -> None:
    fields = json.dumps({"max_tokens": 1400, "ignore_eos": True, "timeout_s": 0.2})
    with pytest.raises(InferenceServerException, match=r"ran past its timeout of 0\.\d+ s"):
        Call(server, text_input=PROMPT, stream=True, sampling_parameters=fields).all()
