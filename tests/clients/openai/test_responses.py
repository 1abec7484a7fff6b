"""The Responses API with OpenAI's own SDK, unchanged: answers, events, tools, thinking, what is kept, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from clients.openai.errors import ApiError
from clients.openai.responses.answer import thinking_tokens
from clients.openai.responses.schema import ResponsesRequest
from clients.openai.responses.translate import chat_request
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

HELLO = "Hello there, 20 °C out."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
TIME: Any = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def client(shim: Shim) -> OpenAI:
    return OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, said: Any, **fields: Any) -> Any:
    return client.responses.create(model="scripted", input=said, temperature=0.0, **fields)


def test_a_response_is_answered(client: OpenAI) -> None:
    response = ask(client, "say h", instructions="Be brief.", metadata={"why": "test"})
    assert (response.object, response.status, response.model) == ("response", "completed", "scripted")
    assert response.id.startswith("resp_")
    assert response.output_text == HELLO
    assert [(item.type, item.role, item.status) for item in response.output] == [("message", "assistant", "completed")]
    assert (response.error, response.incomplete_details) == (None, None)
    assert (response.instructions, response.metadata) == ("Be brief.", {"why": "test"})
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_events_come_in_order_with_numbers(client: OpenAI) -> None:
    events = list(ask(client, "say h", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    seen = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    assert seen == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == HELLO == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens >= 5


def test_text_comes_while_it_is_made(client: OpenAI) -> None:
    deltas = [event.delta for event in ask(client, "say c", stream=True) if event.type == "response.output_text.delta"]
    assert "".join(deltas).endswith(" 95, 96,")
    assert len(deltas) > 1


def test_the_sdk_puts_a_stream_together(client: OpenAI) -> None:
    with client.responses.stream(model="scripted", input="say w", tools=[WEATHER], temperature=0.0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    whole = ask(client, "say w", tools=[WEATHER])
    for response in (final, whole):
        text, call = response.output
        assert text.content[0].text.strip() == "I look."
        assert (call.type, call.name, call.arguments) == (
            "function_call",
            "get_weather",
            '{"city": "Paris", "days": 2}',
        )


def test_a_conversation_goes_on_from_its_last_response(client: OpenAI) -> None:
    first = ask(client, "say w", tools=[WEATHER, TIME])
    call = next(item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
    second = ask(
        client, [output, {"role": "user", "content": "so h"}], tools=[WEATHER, TIME], previous_response_id=first.id
    )
    assert (second.output_text, second.previous_response_id) == (HELLO, first.id)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    sent = ask(
        client,
        [{"role": "user", "content": "say w"}, *items, output, {"role": "user", "content": "so h"}],
        tools=[WEATHER, TIME],
    )
    assert sent.usage.input_tokens == second.usage.input_tokens, "what is kept is what was said"


def test_what_is_kept_can_be_read_and_deleted(client: OpenAI) -> None:
    made = ask(client, "say h")
    assert client.responses.retrieve(made.id).output_text == HELLO
    (item,) = client.responses.input_items.list(made.id).data
    assert (item.role, item.content[0].text) == ("user", "say h")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="No response with the id"):
        client.responses.retrieve(made.id)
    unkept = ask(client, "say h", store=False)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        ask(client, "say h", previous_response_id=unkept.id)


def test_input_tokens_are_counted_as_they_are_charged(client: OpenAI) -> None:
    first = ask(client, "say h", instructions="Be brief.", tools=[WEATHER])
    counted = client.responses.input_tokens.count(
        model="scripted", input="say h", instructions="Be brief.", tools=[WEATHER]
    )
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    more = client.responses.input_tokens.count(model="scripted", input="say h", previous_response_id=first.id)
    assert more.input_tokens == ask(client, "say h", previous_response_id=first.id).usage.input_tokens


@pytest.mark.parametrize(
    ("texts", "count", "expected"),
    [
        ([("content", "x")], 3, 0),
        ([("reasoning_content", "Let me see."), ("content", "The answer.")], 6, 3),
        ([("reasoning_content", "y"), ("content", "x" * 99)], 4, 1),
        ([("reasoning_content", "y" * 99), ("content", "x")], 4, 3),
        ([("reasoning_content", "y"), ("tool_calls", [])], 2, 2),
    ],
)
def test_tokens_of_a_piece_in_which_thinking_ends_are_shared_out(
    texts: list[tuple[str, Any]], count: int, expected: int
) -> None:
    assert thinking_tokens([{key: text} for key, text in texts], count) == expected


def test_thinking_is_an_item_of_its_own(client: OpenAI) -> None:
    whole = ask(client, "say t")
    events = list(ask(client, "say t", stream=True))
    assert "response.reasoning_text.delta" in {event.type for event in events}
    for response in (whole, events[-1].response):
        reasoning, message = response.output
        assert (reasoning.type, reasoning.content[0].text.strip()) == ("reasoning", "Let me see.")
        assert (message.type, message.content[0].text.strip()) == ("message", "The answer.")
        counted = response.usage.output_tokens_details.reasoning_tokens
        assert 0 < counted < response.usage.output_tokens
    again = ask(client, [{"role": "user", "content": "x"}, *whole.output, {"role": "user", "content": "say h"}])
    assert again.output_text == HELLO


def test_tools_are_chosen_as_the_request_says(client: OpenAI) -> None:
    forced = ask(client, "say w", tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    assert [(item.name, item.arguments) for item in forced.output] == [("get_weather", '{"city": "Oslo"}')]
    assert forced.tool_choice.model_dump() == {"type": "function", "name": "get_weather"}, "as it was sent"
    both = ask(client, "say p", tools=[WEATHER, TIME])
    assert [item.name for item in both.output] == ["get_weather", "get_time"]
    one = ask(client, "say p", tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [item.name for item in one.output] == ["get_weather"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    fewer = ask(client, "say h", tools=[WEATHER, TIME], tool_choice=allowed)
    assert fewer.usage.input_tokens < ask(client, "say h", tools=[WEATHER, TIME]).usage.input_tokens


def test_an_answer_that_was_cut_short_says_so(client: OpenAI) -> None:
    response = ask(client, "say h", max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    events = list(ask(client, "say h", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs_come_with_the_text(client: OpenAI) -> None:
    response = ask(client, "say h", include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = response.output[0].content[0].logprobs
    assert len(tokens) >= 5
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    seen = list(ask(client, "say h", include=["message.output_text.logprobs"], top_logprobs=2, stream=True))
    said = [entry for event in seen if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in said] == [token.token for token in tokens][: len(said)]
    done = next(event for event in reversed(seen) if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == [token.token for token in tokens]


def test_a_schema_is_kept_to(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    response = client.responses.create(
        model="demo",
        input="Which?",
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "none"},
        temperature=0.5,
        max_output_tokens=300,
    )
    assert response.status == "completed"
    assert json.loads(response.output_text)["n"] in (1, 2)


def asked(form: dict[str, Any]) -> dict[str, Any]:
    """What a format of a response becomes as one of a chat."""
    body = {"model": "demo", "input": "Which?", "text": {"format": form}}
    made = chat_request(ResponsesRequest.model_validate(body), []).response_format
    assert made is not None
    return made.model_dump(exclude_none=True)


def test_a_schema_beside_json_object_is_kept_to_as_in_chat() -> None:
    form = {"type": "json_object", "schema": {"type": "object", "required": ["n"]}}
    assert asked(form) == form
    assert asked({"type": "json_object"}) == {"type": "json_object"}
    assert asked({"type": "text", "schema": None, "strict": False}) == {"type": "text"}


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "text", "schema": {"type": "object"}}, "text.format.schema"),
        ({"type": "text", "name": "n"}, "text.format.name"),
        ({"type": "json_object", "strict": True}, "text.format.strict"),
        ({"type": "json_object", "description": "Numbers."}, "text.format.description"),
    ],
)
def test_what_does_not_go_with_the_type_of_a_format_is_refused(form: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(form)
    assert caught.value.param == field


def test_strict_functions_are_taken(client: OpenAI) -> None:
    response = ask(client, "say w", tools=[{**WEATHER, "strict": True}, TIME])
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert ask(client, "say h", tools=[{**WEATHER, "strict": True}]).output_text == HELLO


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "F"}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    ({"include": ["file_search_call.results"]}, "file_search_call.results"),
    ({"reasoning": {"summary": "detailed"}}, "summary"),
    ({"tools": [WEATHER], "tool_choice": ALLOWED}, "'F', which is none of `tools`"),
    (
        {"input": [{"role": "user", "content": [{"type": "text", "text": "x", "refusal": "y"}]}]},
        "both text and refusal",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n"}]},
        "namespace",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}}, "text.format"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1 << 20}, "`max_output_tokens` is too large"),
]


@pytest.mark.parametrize(("fields", "about"), REFUSED, ids=[about for _, about in REFUSED])
def test_what_cannot_be_honoured_is_refused(client: OpenAI, fields: dict[str, Any], about: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "scripted", "input": "h", **fields})
    assert about in str(caught.value)


def test_what_asks_for_nothing_is_taken(client: OpenAI) -> None:
    response = ask(
        client,
        [{"type": "message", "role": "developer", "content": "Be brief."}, {"role": "user", "content": "say h"}],
        background=False,
        truncation="disabled",
        service_tier="auto",
        reasoning={"summary": "auto"},
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}},
        tool_choice="auto",
        parallel_tool_calls=True,
        tools=[],
    )
    assert response.output_text == HELLO


@pytest.fixture(scope="module")
def guarded(triton: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    """Two workers, two keys, room for three responses."""
    flags = ("--workers", "2", "--api-key", "one", "--api-key", "two", "--stored-responses", "3")
    shim = Shim(tmp_path_factory.mktemp("guarded"), "--triton", triton, *flags)
    yield shim
    shim.stop()


def test_workers_share_what_is_kept_and_callers_do_not(guarded: Shim) -> None:
    def client(key: str) -> OpenAI:
        return OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=2)

    made = [ask(client("one"), "say h").id for _ in range(4)]
    for _ in range(6):  # each a connection of its own, so that both workers are asked
        assert client("one").responses.retrieve(made[-1]).output_text == HELLO
    with pytest.raises(openai.NotFoundError):
        client("two").responses.retrieve(made[-1])
    with pytest.raises(openai.NotFoundError):
        client("one").responses.retrieve(made[0])
