"""Each model's own forms, or those that the shim was told."""

from __future__ import annotations

from typing import Any

import pytest

from clients.openai.config import ShimConfig
from clients.openai.constraints import chat_constraint
from clients.openai.model_forms import ModelForms
from clients.openai.schema import ChatRequest
from clients.openai.wire import ModelInfo
from engine.text import TemplateMarks

TOOL = {"type": "function", "function": {"name": "f"}}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields)


def test_each_model_has_its_own_forms_and_a_flag_stands_above_them() -> None:
    kimi = ModelInfo("k", template=TemplateMarks(("<|tool_calls_section_begin|>",), ("◁think▷",)))
    assert ModelForms.of(ShimConfig(), kimi) == ModelForms("kimi-k2", "kimi")
    assert ModelForms.of(ShimConfig(tool_parser="none"), kimi) == ModelForms("none", "kimi")
    assert ModelForms.of(ShimConfig(reasoning_parser="none"), kimi) == ModelForms("kimi-k2", "none")
    assert ModelForms.of(ShimConfig(reasoning_parser="think-open"), kimi) == ModelForms("kimi-k2", "think", opened=True)


def test_channels_mark_everything_or_nothing() -> None:
    both = ModelForms("gpt-oss", "gpt-oss")
    for flags in ({"tool_parser": "gpt-oss"}, {"reasoning_parser": "gpt-oss"}):
        assert ModelForms.of(ShimConfig(**flags), ModelInfo("m")) == both  # type: ignore[arg-type]
    assert both.channels
    assert both.keeps_special(request())
    assert not ModelForms().channels
    named = request(tools=[TOOL], tool_choice=TOOL)
    assert both.begun(named) is None, "the prompt begins no message of this form"
    assert both.begins(named, "") == "after"
    assert chat_constraint(named, both, "after") is not None


def test_a_model_whose_template_does_not_say_has_the_usual_ones() -> None:
    for template in (None, TemplateMarks()):
        forms = ModelForms.of(ShimConfig(), ModelInfo("m", template=template))
        assert forms == ModelForms("hermes", "think", shown=template is None)


@pytest.mark.parametrize(
    ("parser", "marks", "thinks"),
    [
        ("auto", ("<tool_call>", "parameters"), False),
        ("auto", ("</think>",), True),
        ("auto", ("[THINK]",), True),
        ("think", (), True),
    ],
)
def test_what_must_keep_to_a_format_leaves_place_for_thinking_that_the_template_or_a_flag_shows(
    parser: Any, marks: tuple[str, ...], thinks: bool
) -> None:
    info = ModelInfo("m", template=TemplateMarks(marks, marks))
    forms = ModelForms.of(ShimConfig(reasoning_parser=parser), info)
    asked = request(response_format={"type": "json_object"})
    before, inside = (chat_constraint(asked, forms, begins) for begins in ("before", "inside"))
    assert before is not None
    assert inside is not None
    assert (before.think, inside.think) == ("may" if thinks else "none", "open")


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
SAID = {"role": "assistant", "content": "y"}
THOUGHT = {"role": "assistant", "content": "<think>\ny"}
CONTINUED = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("forms", "fields", "prompt", "begins"),
    [
        (ModelForms(), {}, "a:", "before"),
        (ModelForms(), {}, "a: <think>\n", "inside"),
        (ModelForms(), {}, "a: <think>\n\n</think>\n\n", "after"),
        (ModelForms(), NO_THINKING, "a:", "after"),
        (ModelForms(), NO_THINKING, "a: <think>", "inside"),
        (ModelForms(opened=True), {}, "a:", "inside"),
        (ModelForms(opened=True), {}, "a: </think>", "after"),
        (ModelForms(opened=True), NO_THINKING, "a:", "after"),
        (ModelForms(reasoning="mistral"), {}, "a: [THINK]", "inside"),
        (ModelForms(reasoning="mistral"), {}, "a: <think>", "before"),
        (ModelForms(reasoning="none"), {}, "a: <think>", "after"),
        (ModelForms(opened=True), {"tools": [TOOL], "tool_choice": TOOL}, "a: {", "after"),
        (ModelForms(), {**CONTINUED, "messages": [SAID]}, "a: y", "after"),
        (ModelForms(), {**CONTINUED, "messages": [THOUGHT]}, "a: <think>\ny", "inside"),
    ],
)
def test_the_end_of_the_prompt_shows_where_an_answer_begins(
    forms: ModelForms, fields: dict[str, Any], prompt: str, begins: str
) -> None:
    assert forms.begins(request(**fields), prompt) == begins


def test_markers_that_are_special_tokens_stay() -> None:
    assert ModelForms("kimi-k2").keeps_special(request(tools=[TOOL]))
    assert ModelForms(reasoning="mistral").keeps_special(request())
    assert not ModelForms("kimi-k2").keeps_special(request())
    assert not ModelForms("none").keeps_special(request())
