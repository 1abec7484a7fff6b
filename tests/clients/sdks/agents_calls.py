"""Programs for agents and for structured answers. Run by the interpreter that has them, with the URL of the shim.

`scripted` knows its answers, `demo` writes what its constraint lets it.
"""

import asyncio
import sys
from typing import Literal

import agents
import instructor
import langchain_anthropic
import langchain_openai
import openai
import pydantic_ai
from pydantic import BaseModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
HELLO = "Hello there, 20 °C out."
KEY = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
SHORT = {"temperature": 0.5, "seed": 1, "max_tokens": 2000}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED = [{"role": "user", "content": "Which?"}]


class Pick(BaseModel):
    n: Literal[1, 2]


def weather(city: str, days: int) -> str:
    """The weather of a city."""
    assert (city, days) == ("Paris", 2)
    return "7h"


def of_instructor() -> None:
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        client = instructor.from_openai(openai.OpenAI(**KEY), mode=instructor.Mode[mode])
        made = client.chat.completions.create(
            model="demo", messages=ASKED, response_model=Pick, max_retries=0, extra_body=NO_THINKING, **SHORT
        )
        assert isinstance(made, Pick), (mode, made)


def of_langchain() -> None:
    chat = langchain_openai.ChatOpenAI(model="demo", extra_body=NO_THINKING, **KEY, **SHORT)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Pick, method=method).invoke("Which?"), Pick), method
    said = langchain_openai.ChatOpenAI(model="scripted", use_responses_api=True, temperature=0, **KEY)
    assert said.invoke("say h").text == HELLO
    claude = langchain_anthropic.ChatAnthropic(
        model="scripted", base_url=URL, api_key="none", max_retries=0, temperature=0, max_tokens=64
    )
    assert claude.invoke("say h").content == HELLO
    assert "".join(str(chunk.content) for chunk in claude.stream("say h")) == HELLO


def of_pydantic_ai() -> None:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    for kind, told in (
        (OpenAIChatModel, {"extra_body": NO_THINKING}),
        (OpenAIResponsesModel, {"openai_reasoning_effort": "none"}),
    ):
        agent = pydantic_ai.Agent(kind("scripted", provider=provider), model_settings={"temperature": 0})
        agent.tool_plain(strict=False, name="get_weather")(weather)
        assert agent.run_sync("say w").output == HELLO
        picking = pydantic_ai.Agent(
            kind("demo", provider=provider),
            output_type=pydantic_ai.NativeOutput(Pick),
            retries=0,
            model_settings={"temperature": 0.5, "max_tokens": 2000, **told},
        )
        assert isinstance(picking.run_sync("Which?").output, Pick)


async def of_openai_agents() -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(**KEY)
    tool = agents.function_tool(weather, name_override="get_weather", strict_mode=False)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="one",
            instructions="Be brief.",
            tools=[tool],
            model=kind(model="scripted", openai_client=client),
            model_settings=agents.ModelSettings(temperature=0),
        )
        assert (await agents.Runner.run(agent, "say w")).final_output == HELLO
        streamed = agents.Runner.run_streamed(agent, "say w")
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == HELLO


of_instructor()
of_langchain()
of_pydantic_ai()
asyncio.run(of_openai_agents())
print("agents: passed")
