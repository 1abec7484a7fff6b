"""litellm's adapters for two APIs. Run by the interpreter that has litellm, with the URL of the shim."""

import json
import sys

import litellm

URL = sys.argv[1]
HELLO = "Hello there, 20 °C out."
OPENAI = {"model": "openai/scripted", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}
ANTHROPIC = {"model": "anthropic/scripted", "api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 100}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


def ask(text):
    return [{"role": "user", "content": text}]


for provider in (OPENAI, ANTHROPIC):
    whole = litellm.completion(**provider, messages=ask("h"))
    assert whole.choices[0].message.content == HELLO, whole
    assert whole.usage.completion_tokens > 0, whole
    pieces = litellm.completion(**provider, messages=ask("h"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == HELLO
    called = litellm.completion(**provider, messages=ask("w"), tools=[WEATHER])
    (call,) = called.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris", "days": 2})
    assert called.choices[0].finish_reason == "tool_calls", called
    assert (
        litellm.completion(**provider, messages=ask("t")).choices[0].message.reasoning_content.strip() == "Let me see."
    )
    try:
        litellm.completion(**{**provider, "model": provider["model"].replace("scripted", "none")}, messages=ask("h"))
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("a model that does not exist answered")
response = litellm.responses(**OPENAI, input="h")
assert response.output[-1].content[0].text == HELLO, response
print("litellm: passed")
