"""Every field is honoured or refused by name. Nothing here needs a server."""

from __future__ import annotations

from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from pydantic import ValidationError

from clients.openai.deadline import Deadline
from clients.openai.errors import ApiError, from_validation
from clients.openai.fields import UnknownFields
from clients.openai.params import sampling_fields
from clients.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Strict, TokenizeRequest
from engine.types import derive_seed

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "hi"}]


def refusal(kind: type[Strict], **fields: Any) -> ApiError:
    base: dict[str, Any] = (
        {"model": "m", "prompt": "x"} if kind is CompletionRequest else {"model": "m", "messages": ASK}
    )
    try:
        UnknownFields(strict=True).take_out(kind.model_validate({**base, **fields}))
    except ApiError as error:
        return error
    except ValidationError as error:
        return from_validation(error.errors())  # type: ignore[arg-type]
    raise AssertionError(f"{fields} is accepted")


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": ASK, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})


def test_every_field_of_the_official_client_is_known() -> None:
    for params, kind in (
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (completion_params.CompletionCreateParamsBase, CompletionRequest),
    ):
        missing = set(params.__annotations__) - set(kind.model_fields)
        assert not missing, f"{kind.__name__} does not know {sorted(missing)}: honour or refuse them"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 0.8}, "length_penalty"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"jsom": {}}}, "structured_outputs"),
        ({"structural_tag": {"triggers": []}}, "structural_tag"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"timeout": 0}, "timeout"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"stop": "x" * 4097}, "stop"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
def test_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(CompletionRequest, **fields)
    assert error.status == 400
    assert (error.param or "").startswith(param)
    assert param.split(".")[-1] in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "refusal": "y"}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning_effort": "x" * 65}, "reasoning_effort"),
        ({"best_of": 2}, "best_of"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"chat_template": "x" * 65537}, "chat_template"),
        ({"messages": [{**ASK[0], "mood": "good"}]}, "messages[0].mood"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_chat_refuses_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(ChatRequest, **fields)
    assert error.status == 400
    assert (error.param or "").startswith(param)
    assert len(error.message) > 20


def test_an_image_is_what_is_refused_and_not_the_messages() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    said = refusal(ChatRequest, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, image]}]).message
    assert said.startswith("`messages` holds what is not supported: a content part of type 'image_url'")


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
@pytest.mark.parametrize(
    ("last", "more"),
    [
        ({"role": "user", "content": "x"}, {}),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}, {}),
    ],
)
def test_only_an_assistants_text_can_be_continued(
    kind: type[Strict], last: dict[str, Any], more: dict[str, Any]
) -> None:
    error = refusal(kind, messages=[*ASK, last], continue_final_message=True, **more)
    assert (error.status, error.param) == (400, "continue_final_message")


def test_null_means_the_default() -> None:
    plain = sampling_fields(chat(), max_tokens=5, logprobs=None, choice=0)
    nulls = chat(**{name: None for name in ChatRequest.model_fields if name not in ("model", "messages")})
    assert sampling_fields(nulls, max_tokens=5, logprobs=None, choice=0) == plain
    assert plain == {"max_tokens": 5}


def test_every_sampling_field_reaches_the_engine_under_its_name() -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "bad_words": ["no"],
        "allowed_token_ids": [1, 2],
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"4": -100.0},
        "priority": 2,
        "prompt_logprobs": 1,
    }
    sent = sampling_fields(completion(**asked, timeout=3.0), max_tokens=9, logprobs=2, choice=0)
    assert sent == {**asked, "max_tokens": 9, "logprobs": 2}
    from engine.types import SamplingParams

    assert set(sent) <= set(SamplingParams.__struct_fields__)


def test_one_stop_string_is_a_list_and_top_k_minus_one_is_off() -> None:
    sent = sampling_fields(completion(stop="a", top_k=-1), max_tokens=None, logprobs=None, choice=0)
    assert sent == {"stop": ["a"]}


def test_a_longer_timeout_than_the_server_allows_is_refused() -> None:
    with pytest.raises(ApiError, match="at most 10 seconds"):
        Deadline.of(11.0, longest_s=10)
    assert Deadline.of(None, longest_s=10).seconds == 10


def test_choices_have_seeds_of_their_own_that_can_be_had_again() -> None:
    seeds = [derive_seed(7, choice) for choice in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [derive_seed(7, choice) for choice in range(100)]
    assert all(0 <= seed < 2**63 for seed in [*seeds, derive_seed(-5, 0)])


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        (ChatRequest, "messages", 1),
        (ChatRequest, "messages", {}),
        (ChatRequest, "tools", {}),
        (CompletionRequest, "prompt", True),
        (CompletionRequest, "prompt", [True]),
        (CompletionRequest, "stop", 1),
        (DetokenizeRequest, "tokens", "a"),
    ],
)
def test_the_first_wrong_item_ends_the_reading_of_a_list(kind: type[Strict], field: str, wrong: Any) -> None:
    """Millions of them would be as many mistakes to keep and to describe."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "m", "messages": ASK, field: [wrong] * 100})
    assert sum(problem["loc"][0] == field for problem in caught.value.errors()) < 10


VLLMS_NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "best_of": 1,
    "documents": [],
    "mm_processor_kwargs": None,
    "kv_transfer_params": None,
    "guided_json": None,
    "store": False,
}


def test_values_that_ask_for_nothing_are_taken() -> None:
    openais = {"metadata": {"user": "7"}, "service_tier": "auto", "reasoning_effort": "low", "modalities": ["text"]}
    openais |= {"parallel_tool_calls": True}
    for request in (chat(**VLLMS_NEUTRAL, **openais), completion(**VLLMS_NEUTRAL)):
        assert UnknownFields(strict=True).take_out(request) == ()
        assert "length_penalty" not in sampling_fields(request, max_tokens=5, logprobs=None, choice=0)


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).limit == 4
    assert chat(max_tokens=3).limit == 3


def test_an_empty_stop_is_refused_in_vllms_words() -> None:
    assert refusal(ChatRequest, stop=["a", ""]).message == "stop cannot contain an empty string."


def test_unknown_fields_are_taken_out_reported_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields(strict=False)
    for _ in range(2):
        messages = [{"role": "user", "content": [{"type": "text", "text": "x", "hue": 1}], "mood\n": 2}]
        request = chat(messages=messages, nonsense=3)
        assert set(fields.take_out(request)) == {"nonsense", "messages[0].mood%0A", "messages[0].content[0].hue"}
        assert "mood\n" not in str(request.model_dump())
        assert "nonsense" not in request.model_dump()
    assert len(caplog.records) == 3
    assert fields.take_out(chat(), ("api-version", "beta", "a b")) == ("?a%20b",)
    many = fields.take_out(chat(**{f"field{i}": i for i in range(5000)}))
    assert len(many) == 16


def test_the_effort_is_a_variable_of_the_template() -> None:
    assert chat(reasoning_effort="low").template_variables == {"reasoning_effort": "low"}
    given = chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high", "x": 1})
    assert given.template_variables == {"reasoning_effort": "high", "x": 1}


def test_names_come_back_cut() -> None:
    error = refusal(ChatRequest, **{"x" * 100_000: 1})
    assert (error.status, error.code) == (400, "unknown_parameter")
    assert len(error.message) <= 2000
    assert len(error.param or "") <= 80
