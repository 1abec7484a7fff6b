"""Templates that do what the templates of each family do, rendered by transformers and here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.types import RequestError
from tests.text.test_chat_template import CALL, TOOL, of, write

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}
    {%- else %}{%- set date_string = "?" %}{%- endif %}
{%- endif %}
{%- set first = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set rest = messages[1:] if first else messages %}
{{- '<|head|>system<|/head|>\\n\\nToday: ' + date_string + '\\n\\n' + first + '<|eot|>' }}
{%- for message in rest %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {{- '<|head|>assistant<|/head|>' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '<|eot|>' }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}
{%- endfor %}
"""
QWEN = """{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string %}
        {%- set ns.looking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}
            {%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', first=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
    {%- if ns.first %}{%- set ns.system = ns.system + message['content'] %}{%- set ns.first = false %}
    {%- else %}{%- set ns.system = ns.system + '\\n\\n' + message['content'] %}{%- endif %}
{%- endif %}{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
    {%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}
"""
KIMI = """{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}
        <|im_system|>system<|im_middle|>Be kind.<|im_end|>
    {%- endif -%}
    {%- set name = message['name'] if message['name'] is defined else message['role'] -%}
    {%- if message['role'] in ('user', 'assistant', 'system') -%}
        <|im_{{ message['role'] }}|>{{ name }}<|im_middle|>
    {%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {%- for call in message['tool_calls'] -%}
            {{ call['function']['name'] }}:{{ call['function']['arguments'] | tojson }}
        {%- endfor -%}
    {%- elif message['content'] is string -%}{{ message['content'] }}
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " What is 17 + 25? 你好"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n42 "},
    {"role": "user", "content": "And <b>now</b>?"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": " In parts "}]}]
CALLS = [*PLAIN[:2], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
FAMILIES: dict[str, tuple[str, list[list[dict[str, Any]]]]] = {
    "llama": (LLAMA, [PLAIN, PLAIN[1:], CALLS]),
    "mistral": (MISTRAL, [PLAIN, PLAIN[1:]]),
    "qwen": (QWEN, [PLAIN, PLAIN[1:3]]),
    "gemma": (GEMMA, [PLAIN, PLAIN[1:], PARTS]),
    "deepseek": (DEEPSEEK, [PLAIN, PLAIN[1:]]),
    "kimi": (KIMI, [PLAIN, PLAIN[1:], CALLS]),
}


@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_as_transformers_renders_it(folder: Path, family: str, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    source, chats = FAMILIES[family]
    theirs = transformers.AutoTokenizer.from_pretrained(str(write(folder, source)))
    how: dict[str, Any] = {"add_generation_prompt": prompt} | ({"tools": [TOOL]} if family == "kimi" else {})
    for chat in chats:
        assert of(folder).render(chat, **how) == theirs.apply_chat_template(chat, tokenize=False, **how)


def test_what_a_template_refuses_is_the_users_error(folder: Path) -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        of(write(folder, MISTRAL)).render([PLAIN[1], PLAIN[1]], add_generation_prompt=True)
