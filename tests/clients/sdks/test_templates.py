"""What published chat templates write for an assistant's calls and thinking is read, and written again the same.
`make test-sdks` fetches them into .cache/sdks/templates; without it these are skipped."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.openai.config import ShimConfig
from clients.openai.model_forms import ModelForms
from clients.openai.prompts import template_messages
from clients.openai.reader import reader_of
from clients.openai.schema import ChatRequest, Message
from clients.openai.tools import CallArguments, CallStart, ContentDelta, ReasoningDelta
from clients.openai.wire import ModelInfo
from engine.text import ChatTemplate, template_marks

FOLDER = Path(__file__).parents[3] / ".cache" / "sdks" / "templates"

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Which"},
        "days": {"type": "integer", "description": "How many"},
        "more": {"type": "object", "description": "Others"},
    },
    "required": ["city"],
}
ZONE = {"type": "object", "properties": {"zone": {"type": "string", "description": "Which"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time", "description": "Time", "parameters": ZONE}},
]
Call = tuple[str, dict[str, Any]]
CALLS: tuple[Call, ...] = (
    ("get_weather", {"city": 'San "José" <b>', "days": 2, "more": {"a": [1, True, "x"]}}),
    ("get_time", {"zone": "UTC"}),
)
TEXTS: tuple[Call, ...] = (("get_weather", {"city": "San 'José' <b>, a = [1]"}), ("get_time", {"zone": "UTC"}))
VALUES: tuple[Call, ...] = (
    ("get_weather", {"days": 2, "more": {"a": [1, True, 'x "y"', None, -0.5]}}),
    ("get_time", {"zone": 1}),
)
CLOSED = "</think>"
# What ends a turn is a token at which generation stops, and no text of an answer.
ENDS = re.compile(
    r"(\s*(<\|im_end\|>|<\|eot_id\|>|<\|eot\|>|</s>|<｜end▁of▁sentence｜>|<｜Assistant｜>|<turn\|>|<end_of_turn>"
    r"|<\|tool_response>))*\s*$"
)


@dataclass(frozen=True)
class Published:
    """What a template is held to.

    tools, reasoning: the forms of calls and of thinking that it shows. shows_tools: it has a place for tools.
    two: it writes two calls. thought: it writes the thinking of a turn with calls.
    calls: what it writes without loss; some put values between quotes or none, and escape nothing.
    """

    tools: str
    reasoning: str = "think"
    shows_tools: bool = True
    two: bool = True
    thought: bool = False
    calls: tuple[Call, ...] = CALLS


PUBLISHED = {
    "Qwen-Qwen2.5-7B-Instruct": Published("hermes"),
    "Qwen-Qwen3-0.6B": Published("hermes", thought=True),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Published("hermes"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Published("hermes"),
    "Qwen3-Coder": Published("qwen3-coder"),
    "Qwen3.5-4B": Published("qwen3-coder", thought=True),
    "meta-llama-Llama-3.1-8B-Instruct": Published("llama3", two=False),
    "meta-llama-Llama-3.2-3B-Instruct": Published("llama3", two=False),
    "meta-llama-Llama-3.3-70B-Instruct": Published("llama3", two=False),
    "tool_chat_template_llama3.2_pythonic": Published("pythonic", calls=VALUES),
    "tool_chat_template_llama4_pythonic": Published("pythonic", calls=TEXTS),
    "Mistral-Small-3.2-24B-Instruct-2506": Published("mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": Published("mistral"),
    "mistralai-Ministral-3-14B-Reasoning-2512": Published("mistral", "mistral"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Published("deepseek-v3", shows_tools=False),
    "deepseek-ai-DeepSeek-V3.1": Published("deepseek-v3.1", shows_tools=False),
    "deepseek-ai-DeepSeek-V3.2": Published("deepseek-v3.2", thought=True),
    "deepseek-ai-DeepSeek-V4": Published("deepseek-v3.2"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Published("deepseek-v3.2"),
    "moonshotai-Kimi-K2": Published("kimi-k2"),
    "google-gemma-4-31B-it": Published("gemma4", "gemma4", thought=True),
    "tool_chat_template_functiongemma": Published("functiongemma", calls=TEXTS),
    "openai-gpt-oss-120b": Published("gpt-oss", "gpt-oss", two=False, thought=True),
}
CASES = [
    (name, count, thinks)
    for name, published in PUBLISHED.items()
    for count in ((1, 2) if published.two else (1,))
    for thinks in ((False, True) if published.thought else (False,))
]


@pytest.mark.skipif(not FOLDER.is_dir(), reason="make test-sdks fetches the templates")
@pytest.mark.parametrize(("name", "count", "thinks"), CASES)
def test_a_published_template_is_read_and_written_again(name: str, count: int, thinks: bool) -> None:
    published = PUBLISHED[name]
    calls = list(published.calls[:count])
    source = (FOLDER / f"{name}.jinja").read_text()
    forms = ModelForms.of(ShimConfig(), ModelInfo("m", template=template_marks({"default": source})))
    assert (forms.tools, forms.reasoning) == (published.tools, published.reasoning)

    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    asked: dict[str, Any] = {"role": "user", "content": "x"}
    variables = {"enable_thinking": True} if thinks else {}

    def render(*messages: dict[str, Any], prompt: bool = False) -> str:
        made = template_messages([Message.model_validate(message) for message in messages], forms)
        tools = TOOLS if published.shows_tools else None
        return template.render(made, tools=tools, add_generation_prompt=prompt, template_kwargs=variables)

    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": function, "arguments": json.dumps(arguments)}}
        for number, (function, arguments) in enumerate(calls)
    ]
    thought = "Let me see." if thinks else ""
    turn = {"role": "assistant", "content": "", "tool_calls": made} | ({"reasoning_content": thought} if thinks else {})
    prompt, whole = render(asked, prompt=True), render(asked, turn)
    # Some templates end a prompt for an answer otherwise than they write the same answer later.
    shared = next(
        (n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    while shared < len(prompt) and whole[shared - 1] in "<|[":
        shared -= 1
    if prompt.endswith(CLOSED) and whole[shared:].startswith(CLOSED):  # opened and closed there, closed alone here
        shared += len(CLOSED)
    written = ENDS.sub("", whole[shared:])

    request = ChatRequest.model_validate({"model": "m", "messages": [asked], "tools": TOOLS})
    begins = forms.begins(request.model_copy(update={"chat_template_kwargs": variables}), whole[:shared])
    reader = reader_of(request, forms, begins, prompt)
    said, reasoning, read = "", "", []
    for delta in [*reader.feed(written), *reader.finish()]:
        match delta:
            case CallStart():
                read.append([delta.name, ""])
            case CallArguments():
                read[-1][1] += delta.text
            case ContentDelta():
                said += delta.text
            case ReasoningDelta():
                reasoning += delta.text
    assert [(function, json.loads(arguments)) for function, arguments in read] == calls
    assert (said.strip(), reasoning.strip()) == ("", thought)
    again = [
        {**call, "function": {"name": function, "arguments": arguments}}
        for call, (function, arguments) in zip(made, read, strict=True)
    ]
    assert render(asked, {**turn, "tool_calls": again}) == whole
