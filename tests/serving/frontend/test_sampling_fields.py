"""Sampling parameters: what is accepted, how it is read, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.serving.frontend.sampling_fields import answers, build, parse_json
from engine.serving.link import messages
from engine.types import RequestError, RequestSpeculation, SamplingParams


def test_strings_are_read_by_the_fields_type() -> None:
    params = build({"temperature": "0", "max_tokens": "1500", "ignore_eos": "true", "logit_bias": {"5": "-1.5"}})
    assert params == SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True, logit_bias={5: -1.5})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": -1}, SamplingParams()),
        ({"seed": -1}, SamplingParams()),
        ({"seed": None}, SamplingParams()),
        ({"stop": "a"}, SamplingParams(stop=("a",))),
        ({"stop": ["a", "b", "a"]}, SamplingParams(stop=("a", "b"))),
        ({"max_completion_tokens": 3}, SamplingParams(max_tokens=3)),
        ({"max_tokens": 4, "max_completion_tokens": "3"}, SamplingParams(max_tokens=3)),
        ({"max_completion_tokens": 3, "max_tokens": 4}, SamplingParams(max_tokens=3)),
        ({"max_completion_tokens": None, "max_tokens": 4}, SamplingParams(max_tokens=4)),
        ({"n": 1, "best_of": "1", "use_beam_search": False, "length_penalty": "1.0"}, SamplingParams()),
        ({"use_beam_search": True}, SamplingParams(temperature=0.0)),
        (
            {"use_beam_search": "true", "n": 2, "best_of": 4, "length_penalty": 0.5},
            SamplingParams(beam_width=4, length_penalty=0.5),
        ),
        ({"beam_width": "3", "early_stopping": True}, SamplingParams(beam_width=3, early_stopping=True)),
        ({"speculation": '{"method": "none"}'}, SamplingParams(speculation=RequestSpeculation("none"))),
        ({"logprobs": "2"}, SamplingParams(logprobs=2)),
        ({"allowed_token_ids": [7, 7, 3] * 9000}, SamplingParams(allowed_token_ids=(7, 3))),
        ({"stop_token_ids": [7] * 9000}, SamplingParams(stop_token_ids=(7,))),
        ({"bad_words": ["a", "", "b", "a"]}, SamplingParams(bad_words=("a", "b"))),
    ],
)
def test_other_servers_spellings(fields: dict[str, Any], expected: SamplingParams) -> None:
    assert build(fields) == expected


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"lora_name": "a"}, "LoRA feature is not enabled."),
        ({"top_pp": 1}, "unknown sampling parameter 'top_pp'; did you mean top_p?"),
        ({"temperature": float("nan")}, "temperature: expected float >= 0.0, got nan"),
        ({"temperature": float("inf")}, "temperature"),
        ({"stop": {"a": 1}}, "stop must be a string or a list of strings"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids holds 129 values; at most 128 are allowed"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids holds 1025 values; at most 1024 are allowed"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias holds 1025 values; at most 1024 are allowed"),
        ({"bad_words": ["no"] * 65}, "bad_words holds 65 strings; at most 64 are allowed"),
        ({"bad_words": "no" * 200}, "bad_words: each must hold between 1 and 256 bytes"),
        ({"bad_words": [f"{i:02}" * 100 for i in range(11)]}, "bad_words: all together must hold at most 2048 bytes"),
        ({"logit_bias": {"5": 1e308}}, "logit_bias values must lie between -1e+06 and 1e+06"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias values must lie between"),
        ({"priority": 10**30}, "a number in the request is out of range: token ids are 32-bit, priority is 64-bit"),
        ({"logit_bias": {10**30: 1}}, "a number in the request is out of range"),
        ({"stop": ["a\ud800"]}, "a text holds '\\ud800', which is half of a character: send whole ones"),
        ({"cache_salt": "\udfff"}, "a text holds '\\udfff'"),
        ({"temperature": "\ud800"}, "a text holds '\\ud800'"),
        ({"n": "\ud800", "use_beam_search": True}, "n must be a whole number from 1 to 128, not '\\ud800'"),
        ({"guided_decoding_guide_type": {}}, "guided_decoding_guide_type must be json"),
        ({"structured_outputs": {"regex": "\ud800"}}, "a text holds '\\ud800'"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        build(fields)
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [{"x" * 100_000: 1}, {"logit_bias": {"x" * 100_000: 1}}, {"max_tokens": "x" * 100_000}, {"stop": ["x" * 100_000]}],
)
def test_what_was_sent_comes_back_cut(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        build(fields)
    assert len(caught.value.message) < 600


def test_more_bytes_than_the_fields_can_need_are_not_read() -> None:
    with pytest.raises(RequestError, match="sampling_parameters: 2097153 bytes are too many"):
        parse_json(b" " * (2 << 20 | 1))


def outcome(call: Callable[[Any], Any], value: Any) -> Any:
    """What `call` returned, or the sentence it refused with. Anything else it raises fails the test."""
    try:
        return call(value)
    except RequestError as error:
        return error.message


@pytest.mark.parametrize(
    ("fields", "counts"),
    [({}, (1, 1)), ({"n": 3}, (3, 3)), ({"n": "2", "best_of": "5"}, (2, 5)), ({"n": None, "best_of": 4}, (1, 4))],
)
def test_n_and_best_of_are_counts(fields: dict[str, Any], counts: tuple[int, int]) -> None:
    assert answers(fields) == counts
    assert build(fields) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n": 0}, "n must be a whole number from 1 to 128, not 0"),
        ({"n": 10**9}, "n must be a whole number from 1 to 128"),
        ({"best_of": "many"}, "best_of must be a whole number from 1 to 128, not 'many'"),
        ({"n": 1.5}, "n must be a whole number"),
        ({"n": 3, "best_of": 2}, "best_of (2) must be at least n (3)"),
    ],
)
def test_other_counts_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        answers(fields)
    assert sentence in caught.value.message


@given(st.binary(max_size=64))
@settings(deadline=None)
def test_any_bytes_are_an_object_or_a_refusal(raw: bytes) -> None:
    result = outcome(parse_json, raw)
    assert isinstance(result, dict) or "sampling_parameters" in result


FIELDS = [field.name for field in msgspec.structs.fields(SamplingParams)]
TEXTS = st.text(st.characters(), max_size=5)  # halves of characters too, as JSON can write them
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.lists(st.integers()))


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_values_are_parameters_or_a_refusal(fields: dict[str, Any]) -> None:
    result = outcome(build, fields)
    assert isinstance(result, SamplingParams | str)
    sent = messages.encode(result)
    assert msgspec.msgpack.decode(sent, type=type(result)) == result, "it reaches the engine, or the client"
