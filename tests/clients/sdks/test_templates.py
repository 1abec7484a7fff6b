"""What published chat templates write for an assistant's calls and thinking is read, and written again the same.
`make test-sdks` fetches them into .cache/sdks/templates; without it these are skipped."""

from __future__ import annotations

import json
import re
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
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'San "José" <b>', "days": 2, "more": {"a": [1, True, "x"]}}),
    ("get_time", {"zone": "UTC"}),
]
# What ends a turn is a token at which generation stops, and no text of an answer.
ENDS = re.compile(
    r"(\s*(<\|im_end\|>|<\|eot_id\|>|</s>|<｜end▁of▁sentence｜>|<｜Assistant｜>|<turn\|>|<\|tool_response>))*\s*$"
)

# file: (form of calls, form of thinking, whether its template shows tools, whether it writes two calls, whether it
# writes the thinking of a turn with calls)
PUBLISHED: dict[str, tuple[str, str, bool, bool, bool]] = {
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", "think", True, True, False),
    "Qwen-Qwen3-0.6B": ("hermes", "think", True, True, True),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", "think", True, True, False),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "think", True, True, False),
    "Qwen3-Coder": ("qwen3-coder", "think", True, True, False),
    "Qwen3.5-4B": ("qwen3-coder", "think", True, True, True),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", "think", True, False, False),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", "think", True, False, False),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", "think", True, False, False),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "think", True, True, False),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "think", True, True, False),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral", True, True, False),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-v3", "think", False, True, False),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v3.1", "think", False, True, False),
    "deepseek-ai-DeepSeek-V4": ("deepseek-v3.2", "think", True, True, False),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek-v3.2", "think", True, True, False),
    "moonshotai-Kimi-K2": ("kimi-k2", "think", True, True, False),
    "google-gemma-4-31B-it": ("gemma4", "gemma4", True, True, True),
    "openai-gpt-oss-120b": ("gpt-oss", "gpt-oss", True, False, True),
}
CASES = [
    (name, count, thinks)
    for name, (*_, two, thought) in PUBLISHED.items()
    for count in ((1, 2) if two else (1,))
    for thinks in ((False, True) if thought else (False,))
]


@pytest.mark.skipif(not FOLDER.is_dir(), reason="make test-sdks fetches the templates")
@pytest.mark.parametrize(("name", "count", "thinks"), CASES)
def test_a_published_template_is_read_and_written_again(name: str, count: int, thinks: bool) -> None:
    calls, thinking, shows_tools, *_ = PUBLISHED[name]
    source = (FOLDER / f"{name}.jinja").read_text()
    forms = ModelForms.of(ShimConfig(), ModelInfo("m", template=template_marks({"default": source})))
    assert (forms.tools, forms.reasoning) == (calls, thinking)

    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    asked: dict[str, Any] = {"role": "user", "content": "x"}
    variables = {"enable_thinking": True} if thinks else {}

    def render(*messages: dict[str, Any], prompt: bool = False) -> str:
        made = template_messages([Message.model_validate(message) for message in messages], forms)
        tools = TOOLS if shows_tools else None
        return template.render(made, tools=tools, add_generation_prompt=prompt, template_kwargs=variables)

    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": function, "arguments": json.dumps(arguments)}}
        for number, (function, arguments) in enumerate(CALLS[:count])
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
    written = ENDS.sub("", whole[shared:])

    request = ChatRequest.model_validate({"model": "m", "messages": [asked], "tools": TOOLS})
    begins = forms.begins(request.model_copy(update={"chat_template_kwargs": variables}), prompt[:shared])
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
    assert [(function, json.loads(arguments)) for function, arguments in read] == CALLS[:count]
    assert (said.strip(), reasoning.strip()) == ("", thought)
    again = [
        {**call, "function": {"name": function, "arguments": arguments}}
        for call, (function, arguments) in zip(made, read, strict=True)
    ]
    assert render(asked, {**turn, "tool_calls": again}) == whole
