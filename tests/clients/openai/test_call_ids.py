"""Ids of calls reach a chat template in the form that it takes, whoever made them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from clients.openai.model_forms import ModelForms
from clients.openai.prompts import template_messages
from clients.openai.schema import Message
from engine.text import ChatTemplate

# The parts about ids of mistralai/Mistral-7B-Instruct-v0.3's template and of moonshotai/Kimi-K2-Thinking's.
MISTRAL = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have length 9') }}{% endif %}[{{ call.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"
)
KIMI = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{% endfor %}"
)


def turn(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    """Calls of one turn, and their answers in the other order."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}} for call_id, name in calls
    ]
    answers = [{"role": "tool", "tool_call_id": call_id, "content": "x"} for call_id, _ in reversed(calls)]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *answers]


def rendered(form: str, template: str, messages: list[dict[str, Any]]) -> str:
    made = template_messages([Message.model_validate(message) for message in messages], ModelForms(tools=form))
    return ChatTemplate({"default": template}).render(json.loads(json.dumps(made)))


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef01234567", "toolu_1", "AbCdEf012"])
def test_mistral_gets_nine_letters(call_id: str) -> None:
    text = rendered("mistral", MISTRAL, turn((call_id, "f"), ("call_2", "f")))
    first, second, last, before = re.findall(r"\w+", text)
    assert (first, second) == (before, last), "an answer names its call"
    assert first != second
    assert re.fullmatch(r"[A-Za-z0-9]{9}", first)
    assert text == rendered("mistral", MISTRAL, turn((call_id, "f"), ("call_2", "f"))), "the prefix stays the same"
    if len(call_id) == 9:
        assert first == call_id


def test_kimi_k2_reads_the_name_in_the_id_and_counts_through_the_conversation() -> None:
    text = rendered("kimi-k2", KIMI, [*turn(("call_a", "f"), ("call_b", "g")), *turn(("call_c", "f"))])
    assert re.findall(r"functions\.\w+:\d+", text) == [
        *("functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0"),
        *("functions.f:2", "functions.f:2"),
    ]
    assert "call_" not in text.replace("tool_call_", "")


def test_other_forms_keep_the_ids_that_came() -> None:
    assert rendered("hermes", MISTRAL, turn(("123456789", "f"))) == "[123456789]<123456789>"
