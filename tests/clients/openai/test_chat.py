"""Chat against a real server, through the official client: `scripted` answers by the last character of the prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time", "description": "What time it is"}},
]


@pytest.fixture(scope="module")
def sdk(shim: Shim) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)


def ask(sdk: openai.OpenAI, last: str, **more: Any) -> Any:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": last}]
    return sdk.chat.completions.create(**{"model": "scripted", "messages": messages, "temperature": 0, **more})


def streamed(sdk: openai.OpenAI, last: str, **more: Any) -> tuple[dict[str, Any], str | None]:
    """The message that the deltas of the only choice add up to, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in ask(sdk, last, stream=True, **more):
        (choice,) = chunk.choices
        assert finish is None, "nothing follows the finish reason"
        delta = choice.delta.model_dump(exclude_none=True)
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        finish = choice.finish_reason
    return message, finish


def test_an_answer_ends_by_itself_and_says_so(sdk: openai.OpenAI) -> None:
    answer = ask(sdk, "h")
    (choice,) = answer.choices
    assert choice.message.content == "Hello there, 20 \u00b0C out."
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == 6
    assert streamed(sdk, "h")[0]["content"] == choice.message.content
    assert ask(sdk, "h", max_tokens=2).choices[0].finish_reason == "length"
    assert ask(sdk, "h", max_completion_tokens=2).choices[0].message.content == "Hello there"


def test_a_request_id_of_the_client_is_part_of_the_answers_id(sdk: openai.OpenAI) -> None:
    answer = ask(sdk, "h", extra_body={"request_id": "mine-1"})
    assert (answer.id, answer._request_id) == ("chatcmpl-mine-1", "mine-1")
    chunks = ask(sdk, "h", stream=True, extra_body={"request_id": "mine-1"}, extra_headers={"X-Request-Id": "abc-1"})
    assert {chunk.id for chunk in chunks} == {"chatcmpl-abc-1"}
    again = [ask(sdk, "h").id for _ in range(2)]
    assert again[0] != again[1]


def test_the_async_client_streams_side_by_side(shim: Shim) -> None:
    async def one(client: openai.AsyncOpenAI, last: str) -> str:
        stream = await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": last}], temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{shim.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, "h") for _ in range(8)))

    assert asyncio.run(run()) == ["Hello there, 20 \u00b0C out."] * 8


def test_a_tool_call_comes_out_of_the_text(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, "w", tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    message, finish = streamed(sdk, "w", tools=TOOLS)
    assert finish == "tool_calls"
    assert message["content"] == "I look."
    assert [c["arguments"] for c in message["tool_calls"]] == [call.function.arguments]
    assert message["tool_calls"][0]["id"] != call.id


def test_calls_come_in_parallel_unless_that_is_turned_off(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, "p", tools=TOOLS).choices
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather", "get_time"]
    assert choice.message.content is None
    (single,) = ask(sdk, "p", tools=TOOLS, parallel_tool_calls=False).choices
    assert [c.function.name for c in single.message.tool_calls] == ["get_weather"]
    assert single.finish_reason == "tool_calls"
    message, finish = streamed(sdk, "p", tools=TOOLS, parallel_tool_calls=False)
    assert ([c["name"] for c in message["tool_calls"]], finish) == (["get_weather"], "tool_calls")


def test_tools_are_not_shown_or_read_with_tool_choice_none(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, "w", tools=TOOLS, tool_choice="none").choices
    assert choice.message.tool_calls is None
    assert "<tool_call>" in choice.message.content
    assert choice.finish_reason == "stop"
    shown, hidden = (ask(sdk, "w", tools=TOOLS, tool_choice=c, max_tokens=1).usage for c in ("auto", "none"))
    assert shown.prompt_tokens > hidden.prompt_tokens


def test_a_named_tool_is_called_whatever_the_model_would_say(sdk: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    (choice,) = ask(sdk, "h", tools=TOOLS, tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_time"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    message, finish = streamed(sdk, "h", tools=TOOLS, tool_choice=named)
    assert [(c["name"], c["arguments"]) for c in message["tool_calls"]] == [("get_time", call.function.arguments)]
    assert finish == "stop"


def test_thinking_is_split_from_the_answer(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, "t").choices
    assert choice.message.content == "The answer."
    assert choice.message.reasoning_content == choice.message.reasoning == "Let me see."
    message, finish = streamed(sdk, "t")
    assert (message["reasoning_content"], message["content"], finish) == ("Let me see.", "The answer.", "stop")
    turns: Any = [{"role": "user", "content": "t"}, {"role": "assistant", "content": "a", "reasoning": "b"}]
    assert ask(sdk, "", messages=[*turns, {"role": "user", "content": "h"}]).choices[0].message.content
    (without,) = ask(sdk, "t", extra_body={"include_reasoning": False}).choices
    assert not hasattr(without.message, "reasoning_content")


def test_an_unknown_field_is_reported_in_a_header(sdk: openai.OpenAI) -> None:
    extra = {"use_beam_search": False, "spaces_between_special_tokens": True, "nonsense": 1}
    raw = sdk.chat.completions.with_raw_response.create(
        model="scripted",
        messages=[{"role": "user", "content": "h"}],
        metadata={"a": "b"},
        store=False,
        reasoning_effort="low",
        temperature=0,
        max_tokens=9,
        max_completion_tokens=2,
        extra_body=extra,
    )
    assert raw.headers["x-ignored-fields"] == "nonsense"
    assert raw.parse().usage.completion_tokens == 2
    plain = sdk.chat.completions.with_raw_response.create(model="scripted", messages=[{"role": "user", "content": "h"}])
    assert "x-ignored-fields" not in plain.headers


def test_a_message_can_be_continued(sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Oh"}]
    answer = ask(sdk, "", messages=messages, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == "Hello there, 20 \u00b0C out."
    echoed = ask(sdk, "", messages=messages, extra_body={"continue_final_message": True, "echo": True})
    assert echoed.choices[0].message.content == "OhHello there, 20 \u00b0C out."


def test_every_token_has_its_logprob_though_text_is_held_back(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, "w", tools=TOOLS, logprobs=True, top_logprobs=2).choices
    whole = [entry.token for entry in choice.logprobs.content]
    assert "".join(whole[:-1]).startswith("I look.\n<tool_call>")
    assert whole[-1] == "<|im_end|>"
    assert all(len(entry.top_logprobs) == 2 and entry.logprob > -0.1 for entry in choice.logprobs.content)
    assert bytes(choice.logprobs.content[0].bytes) == b"I look"
    pieces = ask(sdk, "w", tools=TOOLS, logprobs=True, top_logprobs=2, stream=True)
    found = [e.token for p in pieces if p.choices[0].logprobs for e in p.choices[0].logprobs.content]
    assert found == whole


def test_a_part_of_a_character_has_its_bytes(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, "h", logprobs=True).choices
    assert "\ufffd" in "".join(entry.token for entry in choice.logprobs.content)
    data = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content[:-1])
    assert data.decode() == choice.message.content


def test_conversations_with_tool_results_are_rendered(sdk: openai.OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "time?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon h"},
    ]
    answer = ask(sdk, "", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Hello there, 20 \u00b0C out."
    broken: Any = [{**messages[2], "tool_calls": [{**call, "function": {"name": "f", "arguments": "{"}}]}]
    with pytest.raises(openai.BadRequestError, match="arguments"):
        ask(sdk, "", messages=broken)


def test_choices_and_usage_of_a_streamed_chat(sdk: openai.OpenAI) -> None:
    chunks = list(ask(sdk, "h", n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    roles = [c.index for chunk in chunks for c in chunk.choices if c.delta.role == "assistant"]
    assert sorted(roles) == [0, 1]
    assert sum(c.finish_reason == "stop" for chunk in chunks for c in chunk.choices) == 2


def test_template_variables_must_not_hide_fields_of_the_request(shim: Shim) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "h"}], "chat_template_kwargs": {"tools": []}}
    response = httpx.post(f"{shim.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"
