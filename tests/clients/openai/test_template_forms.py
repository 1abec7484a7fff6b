"""A chat template shows how its model writes calls and thinking. The templates have the forms of published ones."""

from __future__ import annotations

from typing import Any

import pytest

from clients.openai.config import ShimConfig
from clients.openai.model_forms import ModelForms
from clients.openai.schema import ChatRequest
from clients.openai.wire import ModelInfo
from engine.text import ChatTemplate, TemplateMarks, template_marks

USER = {"role": "user", "content": "x"}

PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
V3_CALL = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name"
# (family, its template's telling part, the form of calls)
CALLS = [
    ("Qwen 2.5 and 3", '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}', "hermes"),
    (
        "Qwen3-Coder",
        "{{- '<tool_call>\\n<function=' + tool.name + '>\\n' }}{{- '<parameter=' + k + '>\\n' }}",
        "qwen3-coder",
    ),
    (
        "Llama 3.1",
        "{{- '<|start_header_id|>assistant' }}{{- '\"parameters\": ' }}{{- call.arguments | tojson }}",
        "llama3",
    ),
    (
        "Llama 3.2, Python's calls",
        "{{- 'Format: [func_name1(params_name1=params_value1), func_name2(...)]' }}",
        "pythonic",
    ),
    (
        "Llama 4",
        "{{- '<|header_start|>' }}{{- 'Use exact format: [func_name1(param1=value1)], parameters' }}",
        "pythonic",
    ),
    ("Mistral", "{{- '[TOOL_CALLS][' }}{%- for tool_call in message.tool_calls %}", "mistral"),
    ("DeepSeek V3", V3_CALL + " + '\\n' + '```json' + '\\n' + arguments }}", "deepseek-v3"),
    (
        "DeepSeek V3.1",
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + args }}",
        "deepseek-v3.1",
    ),
    ("Kimi K2", "<|tool_calls_section_begin|>{%- for call in calls %}<|tool_call_begin|>", "kimi-k2"),
    ("DeepSeek V3.2", "{%- set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls>", "deepseek-v3.2"),
    ("Gemma 4", "{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
    ("FunctionGemma", "{{- '<start_function_call>call:' + name + '{' -}}", "functiongemma"),
    ("gpt-oss", "{{- '<|channel|>commentary json<|message|>' }}", "gpt-oss"),
    ("no tools", "{{ message.content }}", "hermes"),
]
# What the published templates end with: Qwen/QwQ-32B, Qwen3-8B, Qwen3.5; deepseek-ai/DeepSeek-V3.1, whose prompt ends
# with the tool's answer where one is last; DeepSeek V3.2 as other servers template it, with its tags in variables.
OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
SHUT = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
EITHER = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)
V31 = (
    "{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}"
    "{%- set ns = namespace(is_tool=false) %}{%- for message in messages %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true %}{{ '<｜tool▁output▁begin｜>' }}"
    "{{ message['content'] + '<｜tool▁output▁end｜>' }}{%- else %}{{ message['content'] }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}"
    "{%- if not thinking %}{{ '</think>' }}{%- else %}{{ '<think>' }}{%- endif %}{%- endif %}"
)
V32 = (
    "{%- set thinking_start_token = '<think>' %}{%- set thinking_end_token = '</think>' %}"
    "{{ '<｜Assistant｜>' + (thinking_start_token if thinking else thinking_end_token) }}"
)
KIMI_VL = "{{ '◁think▷' if never }}" + PROMPT
MAGISTRAL = "{{- '[THINK]your thoughts[/THINK]' if never }}"
GEMMA = "{{- '<|turn>model\\n' }}{%- if not enable_thinking %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}"
OFF, ON = {"enable_thinking": False}, {"thinking": True}
# (family, its template's end, variables, the name of the thinking's tags, where an answer begins)
THINKING: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("Qwen3", "{{- '<think>' if never }}" + SHUT, {}, "think", "before"),
    ("Qwen3, told not to", SHUT, OFF, "think", "after"),
    ("QwQ", OPEN, {}, "think", "inside"),
    ("QwQ, whose template has no such variable", OPEN, OFF, "think", "inside"),
    ("Qwen3.5", EITHER, {}, "think", "inside"),
    ("Qwen3.5, told not to", EITHER, OFF, "think", "after"),
    ("DeepSeek V3.1", V31, {}, "think", "after"),
    ("DeepSeek V3.1, asked to", V31, ON, "think", "inside"),
    ("DeepSeek V3.1, asked to and not to", V31, ON | OFF, "think", "inside"),
    ("DeepSeek V3.1, told not to", V31, {"thinking": False}, "think", "after"),
    ("DeepSeek V3.2", V32, ON, "think", "inside"),
    ("DeepSeek V3.2, not asked to", V32, {}, "think", "after"),
    ("Kimi K2 Thinking", "{{ '<think></think>' if never }}" + PROMPT, {}, "think", "before"),
    ("Kimi-VL-Thinking", KIMI_VL, {}, "kimi", "before"),
    ("Gemma 4", GEMMA, {"enable_thinking": True}, "gemma4", "before"),
    ("Gemma 4, not asked to", GEMMA, {}, "gemma4", "after"),
    ("gpt-oss", "{{ '<|channel|>analysis' if never }}{{ '<|start|>assistant' }}", {}, "gpt-oss", "after"),
    ("Magistral", MAGISTRAL, {}, "mistral", "before"),
    ("no thinking", PROMPT, {}, "think", "before"),
]


def forms(source: str) -> ModelForms:
    return ModelForms.of(ShimConfig(), ModelInfo("m", template=template_marks({"default": source})))


@pytest.mark.parametrize(("source", "form"), [case[1:] for case in CALLS], ids=[case[0] for case in CALLS])
def test_a_template_shows_the_form_of_calls(source: str, form: str) -> None:
    assert forms(source + PROMPT).tools == form


def begins(source: str, variables: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    prompt = ChatTemplate({"default": source}).render(messages, template_kwargs=variables)
    request = {"model": "m", "messages": messages, "chat_template_kwargs": variables}
    return forms(source).begins(ChatRequest.model_validate(request), prompt)


@pytest.mark.parametrize(
    ("source", "variables", "form", "where"), [case[1:] for case in THINKING], ids=[case[0] for case in THINKING]
)
def test_a_rendered_prompt_shows_where_the_answer_begins(
    source: str, variables: dict[str, Any], form: str, where: str
) -> None:
    assert forms(source).reasoning == form
    assert begins(source, variables, [USER]) == where


def test_behind_the_answer_of_a_tool_nothing_is_open() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "1", "content": "7"}]
    assert begins(V31, ON, turns) == "before"
    assert begins(OPEN, {}, turns) == "inside"


def test_the_template_for_tools_shows_the_calls() -> None:
    marks = template_marks({"default": MAGISTRAL, "tool_use": "{{- '[TOOL_CALLS]' }}"})
    assert ModelForms.of(ShimConfig(), ModelInfo("m", template=marks)) == ModelForms("mistral", "mistral")
    assert template_marks({}) == TemplateMarks()
