"""Structured output through the official client: `demo` is a small model that knows nothing of JSON."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import numpy as np
import openai
import pydantic
import pytest
import tritonclient.grpc as grpc

from clients.python.local_server import LocalServer
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "Who?"}]
COMPACT: Any = {"guided_whitespace_pattern": ""}
NUMBER = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</n>"}
# The older form; its trigger comes soon.
EVERY_E = {
    "structures": [{"begin": "e=", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": ";"}],
    "triggers": ["e"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "set_age", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def sdk(shim: Shim) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)


def ask(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "demo", "messages": ASK, "max_tokens": 400, "seed": 5, **more})


def format_of(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def test_every_choice_follows_the_schema(sdk: openai.OpenAI) -> None:
    answer = ask(sdk, response_format=format_of(SCHEMA), n=4, logprobs=True, extra_body=COMPACT)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


def test_a_stream_is_the_whole_answer(sdk: openai.OpenAI) -> None:
    more: Any = {"response_format": format_of(SCHEMA), "extra_body": COMPACT}
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(sdk, stream=True, **more)]
    assert "".join(parts) == ask(sdk, **more).choices[0].message.content


def test_parse_gives_objects(sdk: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: Literal["Ann", "Bo"]
        grown: bool

    answer = sdk.chat.completions.parse(
        model="demo", messages=ASK, response_format=Person, max_tokens=400, extra_body=COMPACT
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{3}-\\d"}, "[ab]{3}-\\d"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"structured_outputs": {"regex": "(ab)+c"}}, "(ab)+c"),
        ({"structured_outputs": {"json": {"const": 7}, "disable_any_whitespace": True}}, "7"),
        ({"response_format": {"type": "structural_tag", "format": NUMBER}}, "<n>[0-9]{3}</n>"),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": NUMBER})}}, "<n>[0-9]{3}</n>"),
        ({"response_format": {"type": "structural_tag", **EVERY_E}}, "(?s)[^e]*(e=[0-9];[^e]*)+(e(=([0-9];?)?)?)?"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 3}, "(?s)\\s*\\{.*"),
    ],
)
def test_vllms_fields_hold_completions_too(sdk: openai.OpenAI, fields: Any, pattern: str) -> None:
    body = {"max_tokens": 200, **fields}
    answer = sdk.completions.create(model="demo", prompt="def f(", seed=3, extra_body=body)
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_age"}}])
def test_calls_that_must_come_fit_their_schema(sdk: openai.OpenAI, choice: Any) -> None:
    (one,) = ask(sdk, model="scripted", tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False).choices
    (call,) = one.message.tool_calls
    assert call.function.name == "set_age"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert not one.message.content


@pytest.mark.parametrize(
    ("schema", "word"),
    [({"type": "nope"}, "nope"), ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"not": {}}, "not")],
)
def test_a_schema_that_cannot_be_honoured_is_a_400(sdk: openai.OpenAI, schema: Any, word: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(sdk, response_format=format_of(schema))
    assert word in caught.value.message
    assert caught.value.param == "structured_outputs"


def test_an_element_of_a_tag_that_cannot_be_honoured_is_a_400(sdk: openai.OpenAI) -> None:
    for given in ({**NUMBER, "style": 1}, {"type": "any_text", "max_tokens": 3}):
        with pytest.raises(openai.BadRequestError, match=r"style|max_tokens"):
            ask(sdk, response_format={"type": "structural_tag", "format": given})


def test_a_structural_tag_holds_chat_and_leaves_text_free(sdk: openai.OpenAI) -> None:
    more: Any = {"response_format": {"type": "structural_tag", **EVERY_E}, "max_tokens": 60}
    (one,) = ask(sdk, **more).choices
    assert re.fullmatch("(?s)[^e]*(e=[0-9];[^e]*)+(e(=([0-9];?)?)?)?", one.message.content)


def test_tensorrt_llms_tensors_say_the_same(server: LocalServer) -> None:
    def tensor(name: str, value: Any, dtype: str) -> Any:
        made = grpc.InferInput(name, [1], dtype)
        made.set_data_from_numpy(np.array([value], object if dtype == "BYTES" else np.int32))
        return made

    inputs = [
        tensor("text_input", b"Who?", "BYTES"),
        tensor("max_tokens", 50, "INT32"),
        tensor("guided_decoding_guide_type", b"regex", "BYTES"),
        tensor("guided_decoding_guide", b"[ab]{3}", "BYTES"),
    ]
    answers: list[Any] = []
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer("demo", inputs)
        client.stop_stream()
    (result, error), *_ = answers
    assert error is None, error
    assert re.fullmatch(b"(Who\\?)?[ab]{3}", result.as_numpy("text_output")[0])
