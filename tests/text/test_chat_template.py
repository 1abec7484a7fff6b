from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.text import ChatTemplate, read_templates
from engine.types import RequestError

QWEN_LIKE = """{%- if tools %}
    {{- '<|user|>tools:' }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' and not loop.previtem %}
        {{- raise_exception('a tool message must follow a call') }}
    {%- endif %}
    {{- '<|user|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{- message.content }}{% endgeneration %}
    {%- else %}{{- message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '[' + call.function.name + ' ' + (call.function.arguments | tojson) + ']' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
    {%- if message.role == 'never' %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|user|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
TRIMMING = (
    "{{ bos_token }}{{ (tools or []) | tojson }}"
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} {{ eos_token }}{% endfor %}"
)

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "你好 🙂"},
    {"role": "assistant", "content": "Hello "},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"é": {}}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": "<2>"}}}


def write(folder: Path, template: object) -> Path:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|user|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def of(folder: Path) -> ChatTemplate:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template


@pytest.mark.parametrize("source", [QWEN_LIKE, TRIMMING], ids=["qwen-like", "trimming"])
@pytest.mark.parametrize(
    "how",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"add_generation_prompt": True, "tools": [TOOL]},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["prompt", "no prompt", "no thinking", "tools", "continue"],
)
def test_equal_to_transformers(folder: Path, source: str, how: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(write(folder, source)))
    chat = [*CHAT[:2], {"role": "assistant", "content": "x", "tool_calls": [CALL]}, CHAT[2]]
    ours = {name: value for name, value in how.items() if name != "enable_thinking"}
    more = {name: value for name, value in how.items() if name == "enable_thinking"}
    assert of(folder).render(chat, template_kwargs=more, **ours) == theirs.apply_chat_template(
        chat, tokenize=False, **how
    )


def test_tools_that_a_template_would_drop_are_refused(folder: Path) -> None:
    template = of(write(folder, "{% for message in messages %}{{ message.content }}{% endfor %}"))
    assert template.render(CHAT, tools=[]) == template.render(CHAT)
    with pytest.raises(RequestError, match="tools would not reach this model"):
        template.render(CHAT, tools=[TOOL])


def test_a_template_file_comes_before_the_config(folder: Path) -> None:
    write(folder, "from config")
    (folder / "chat_template.jinja").write_text("from file")
    assert of(folder).render(CHAT) == "from file"


def test_named_templates_serve_chats_with_and_without_tools(folder: Path) -> None:
    write(
        folder, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools[0].type }}"}]
    )
    assert of(folder).render(CHAT) == "plain"
    assert of(folder).render(CHAT, tools=[TOOL]) == "with function"


def test_a_folder_without_a_template_has_none(folder: Path) -> None:
    assert ChatTemplate.from_folder(folder) is None


def test_text_parts_and_json_arguments_reach_the_template_as_text_and_objects(folder: Path) -> None:
    template = of(write(folder, QWEN_LIKE))
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template.render(parts) == template.render([{"role": "user", "content": "a\nb"}])
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1, "y": "<2>"}'}}
    message = {"role": "assistant", "content": ""}
    assert template.render([{**message, "tool_calls": [as_text]}]) == template.render(
        [{**message, "tool_calls": [CALL]}]
    )


@pytest.mark.parametrize("given", [{"x": 1, "y": "é"}, '{"x": 1, "y": "é"}'], ids=["object", "text"])
def test_arguments_are_an_object_and_text_where_they_are_added_to_text(given: Any) -> None:
    """deepseek-ai/DeepSeek-V3.1's template writes `'<｜tool▁sep｜>' + tool['function']['arguments'] + '...'`."""
    source = (
        "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.arguments is mapping }} "
        "{{ '<' + call['function']['arguments'] + '>' }} {{ call.function.arguments + '>' }} "
        "{{ call.function.arguments }} {{ call.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    text = ChatTemplate({"default": source}).render([{"role": "assistant", "tool_calls": [call]}])
    json_text = '{"x": 1, "y": "é"}'
    assert text == f"True <{json_text}> {json_text}> {json_text} 1"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        (["x"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": 3}], "content must be a string or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type image_url"),
        ([{"role": "tool", "content": "x"}], "a tool message must follow a call"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments that are not JSON",
        ),
        ([{"role": "user"}], "has no content"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(folder: Path, messages: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        of(write(folder, QWEN_LIKE)).render(messages)


def test_a_message_that_the_template_drops_cannot_be_continued(folder: Path) -> None:
    with pytest.raises(RequestError, match="leaves out the last message"):
        of(write(folder, "nothing")).render(CHAT, continue_final_message=True)


def test_a_template_cannot_leave_the_sandbox(folder: Path) -> None:
    with pytest.raises(RequestError, match="refused"):
        of(write(folder, "{{ messages.__class__.__mro__[-1].__subclasses__() }}")).render(CHAT)
    with pytest.raises(RequestError, match="refused"):
        of(write(folder, "{% set _ = messages.append(1) %}")).render(CHAT)


def test_a_broken_template_is_named_at_load(folder: Path) -> None:
    with pytest.raises(RequestError, match="not valid Jinja"):
        of(write(folder, "{% if %}"))
    with pytest.raises(RequestError, match="must be a string or a list"):
        of(write(folder, [{"template": "x"}]))


def test_arguments_reach_the_template_but_cannot_replace_fields_of_the_request() -> None:
    template = ChatTemplate({"default": "{{ special }}"})
    assert template.render(CHAT, template_kwargs={"special": 1}) == "1"
    with pytest.raises(RequestError, match="must not hold messages"):
        template.render(CHAT, template_kwargs={"messages": []})


@pytest.mark.parametrize("named", [False, True])
def test_templates_of_megabytes_are_not_compiled(folder: Path, named: bool) -> None:
    """They took 20 s to be refused."""
    (folder / "chat_template.jinja").write_text("{{ 'a' }}" * 300_000)
    with pytest.raises(RequestError, match="have 2700000 characters; at most 524288"):
        read_templates(folder, folder / "chat_template.jinja" if named else None)
