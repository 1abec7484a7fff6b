"""The Messages API with Anthropic's own SDK, unchanged: answers, streams, tools, thinking, counting, errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from clients.openai.messages.schema import CountRequest
from clients.openai.messages.translate import chat_request
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
GREEDY: Any = {"temperature": 0.0}  # today's SDK has no argument for it
TIME: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def client(shim: Shim) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=shim.url, api_key="none", max_retries=0)


def ask(client: anthropic.Anthropic, text: str, **fields: Any) -> Any:
    fields = {"max_tokens": 64, "extra_body": GREEDY, **fields}
    return client.messages.create(model="scripted", messages=[{"role": "user", "content": text}], **fields)


def test_a_message_is_answered(client: anthropic.Anthropic) -> None:
    message = ask(client, "say h", system="Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "scripted")
    assert message.id.startswith("msg_")
    assert [block.text for block in message.content] == ["Hello there, 20 °C out."]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 0
    assert usage.output_tokens >= 5


def test_a_stream_says_what_the_whole_answer_says(client: anthropic.Anthropic) -> None:
    whole = ask(client, "say h")
    with client.messages.stream(
        model="scripted", max_tokens=64, extra_body=GREEDY, messages=[{"role": "user", "content": "say h"}]
    ) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == whole.content[0].text
    assert (message.content[0].text, message.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_the_order_of_the_api(shim: Shim) -> None:
    body = {
        "model": "scripted",
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
        "messages": [{"role": "user", "content": "say w"}],
        "tools": [WEATHER],
    }
    lines = httpx.post(f"{shim.url}/v1/messages", json=body, timeout=60).text.split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    seen = [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert seen == ["message_start", *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_goes_back(client: anthropic.Anthropic, stream: bool) -> None:
    asked: Any = {
        "model": "scripted",
        "max_tokens": 64,
        "extra_body": GREEDY,
        "messages": [{"role": "user", "content": "say w"}],
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "auto"},
    }
    if stream:
        with client.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    text, use = message.content
    assert message.stop_reason == "tool_use"
    assert (text.type, text.text.strip()) == ("text", "I look.")
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Paris", "days": 2})
    answer = client.messages.create(
        model="scripted",
        max_tokens=64,
        extra_body=GREEDY,
        tools=[WEATHER, TIME],
        messages=[
            *asked["messages"],
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "mild"}]},
                    {"type": "text", "text": "so h"},
                ],
            },
        ],
    )
    assert answer.content[0].text == "Hello there, 20 °C out."


def test_calls_side_by_side_and_one_alone(client: anthropic.Anthropic) -> None:
    both = ask(client, "say p", tools=[WEATHER, TIME])
    assert [(block.name, block.input) for block in both.content] == [
        ("get_weather", {"city": "Rome"}),
        ("get_time", {}),
    ]
    one = ask(
        client,
        "say p",
        tools=[WEATHER, TIME],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.name for block in one.content] == ["get_weather"]
    assert one.stop_reason == "tool_use"


def test_a_tool_can_be_forced(client: anthropic.Anthropic) -> None:
    message = ask(client, "say w", tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    assert [(block.type, block.name) for block in message.content] == [("tool_use", "get_weather")]
    assert message.content[0].input == {"city": "Oslo"}
    assert message.stop_reason == "tool_use"


def test_a_call_can_be_asked_for(client: anthropic.Anthropic) -> None:
    message = ask(client, "say w", tools=[WEATHER, TIME], tool_choice={"type": "any"}, thinking={"type": "disabled"})
    assert message.content[0].type == "tool_use"
    assert message.content[0].name in ("get_weather", "get_time")


def test_a_schema_is_kept_to(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    message = client.messages.create(
        model="demo",
        max_tokens=300,
        messages=[{"role": "user", "content": "Which?"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "disabled"},
        extra_body={"temperature": 0.5, "seed": 1},
    )
    assert message.stop_reason == "end_turn"
    assert json.loads(message.content[0].text)["n"] in (1, 2)


def test_the_stop_sequence_that_was_met_is_named(client: anthropic.Anthropic) -> None:
    message = ask(client, "say h", stop_sequences=["nothing", " there,", "20"])
    assert message.content[0].text == "Hello"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " there,")


def test_the_limit_is_told(client: anthropic.Anthropic) -> None:
    message = ask(client, "say h", max_tokens=2)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


def test_an_assistant_turn_at_the_end_is_continued(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="scripted",
        max_tokens=64,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "sigh"}],
    )
    assert message.content[0].text == "Hello there, 20 °C out."


def test_thinking_is_a_block_of_its_own(client: anthropic.Anthropic) -> None:
    message = ask(client, "say t", thinking={"type": "adaptive"})
    with client.messages.stream(
        model="scripted", max_tokens=64, extra_body=GREEDY, messages=[{"role": "user", "content": "say t"}]
    ) as stream:
        streamed = stream.get_final_message()
    for answer in (message, streamed):
        thinking, text = answer.content
        assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Let me see.")
        assert (text.type, text.text.strip()) == ("text", "The answer.")
    hidden = ask(client, "say t", thinking={"type": "adaptive", "display": "omitted"})
    assert [block.text.strip() for block in hidden.content] == ["The answer."]


def test_thinking_ends_with_its_budget(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="demo",
        max_tokens=1100,
        extra_body={"temperature": 0.5, "seed": 1, "top_k": 5},
        messages=[{"role": "user", "content": "How do I open a file?"}],
        thinking={"type": "enabled", "budget_tokens": 4},
        output_config={"format": {"type": "json_schema", "schema": {"enum": [1, 2]}}},
    )
    assert message.stop_reason == "end_turn"
    assert message.content[-1].text in ("1", "2")
    assert message.usage.output_tokens < 40, "the demo model does not end its thinking by itself"


@pytest.mark.parametrize(("is_error", "told"), [(True, "Error: no city"), (False, "no city"), (None, "no city")])
def test_a_tool_that_failed_says_so_to_the_model(is_error: bool | None, told: str) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no city", "is_error": is_error}
    request = CountRequest.model_validate(
        {"model": "m", "messages": [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    )
    assert [message.content for message in chat_request(request).messages] == ["", told]


def test_models_are_listed_for_this_sdk_too(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "scripted"]
    model = client.models.retrieve("demo")
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", "demo", 8192)


def test_tokens_are_counted_as_they_are_charged(client: anthropic.Anthropic) -> None:
    fields: Any = {"system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(
        model="scripted", messages=[{"role": "user", "content": "how warm is it, h"}], **fields
    )
    usage = ask(client, "how warm is it, h", **fields).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


REFUSED = [
    ({"model": "missing"}, anthropic.NotFoundError, "not_found_error", "missing"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
    ({"stop_sequences": ["a", ""]}, anthropic.BadRequestError, "invalid_request_error", "stop_sequences[1]"),
    ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError, "invalid_request_error", "temperature"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "image",
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "web_search",
    ),
    (
        {"thinking": {"type": "adaptive", "budget_tokens": 1024}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "budget_tokens",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {}, "zzz": 1}}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "output_config.format.zzz",
    ),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "a JSON schema, as an object",
    ),
    ({"container": "c"}, anthropic.BadRequestError, "invalid_request_error", "container"),
]


@pytest.mark.parametrize(("fields", "error", "kind", "about"), REFUSED, ids=[about for *_, about in REFUSED])
def test_what_cannot_be_honoured_is_refused(
    client: anthropic.Anthropic, fields: dict[str, Any], error: type[anthropic.APIStatusError], kind: str, about: str
) -> None:
    body: dict[str, Any] = {"model": "scripted", "max_tokens": 8, "messages": [{"role": "user", "content": "h"}]}
    with pytest.raises(error) as caught:
        client.messages.create(**{**body, **fields})
    answer: Any = caught.value.body
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert about in answer["error"]["message"]
    assert answer["request_id"] == caught.value.request_id


def test_what_asks_for_nothing_is_taken(client: anthropic.Anthropic) -> None:
    mark: Any = {"type": "ephemeral"}
    message = client.messages.create(
        model="scripted",
        max_tokens=64,
        extra_body=GREEDY,
        system=[{"type": "text", "text": "Be brief.", "cache_control": mark}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "say h", "cache_control": mark}]}],
        metadata={"user_id": "somebody"},
        service_tier="auto",
        thinking={"type": "disabled"},
    )
    assert message.content[0].text == "Hello there, 20 °C out."


def test_a_key_comes_as_the_sdk_sends_it(triton: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    shim = Shim(tmp_path_factory.mktemp("keys"), "--triton", triton, "--api-key", "secret")
    try:
        good = anthropic.Anthropic(base_url=shim.url, api_key="secret", max_retries=0)
        assert ask(good, "say h").content[0].text == "Hello there, 20 °C out."
        with pytest.raises(anthropic.AuthenticationError):
            ask(anthropic.Anthropic(base_url=shim.url, api_key="wrong", max_retries=0), "say h")
    finally:
        shim.stop()
