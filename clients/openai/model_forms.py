"""The forms in which one model writes calls of tools and thinking: what the shim was told, or the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clients.openai.calls.forms import FORMS
from clients.openai.config import ShimConfig
from clients.openai.reasoning import TAGS, Begins
from clients.openai.wire import ModelInfo
from engine.text import TemplateMarks

if TYPE_CHECKING:
    from clients.openai.schema import ChatRequest

_TOOLS, _THINKING = "hermes", "think"  # of a model whose template does not say
_LLAMA = {"<|start_header_id|>", "<|header_start|>", "<|python_tag|>"}
_CHANNELS = "gpt-oss"
_TAGS_SHOWN = {"<think>", "</think>", "[THINK]", "◁think▷", "<|channel>", "<|channel|>"}
_SWITCHES = ("enable_thinking", "thinking")  # variables with which templates turn thinking off


@dataclass(frozen=True, slots=True)
class ModelForms:
    """tools: a name of FORMS, or `none`; reasoning: a name of TAGS, `gpt-oss` where that is the form of calls too, or
    `none`.

    opened: each answer begins within its thinking, unless the prompt shows otherwise.
    shown: the template has tags of thinking, or the shim was told them; an answer of another model that must keep to a
        format begins with it.
    """

    tools: str = _TOOLS
    reasoning: str = _THINKING
    opened: bool = False
    shown: bool = True

    @classmethod
    def of(cls, config: ShimConfig, info: ModelInfo) -> ModelForms:
        template = info.template
        own = cls() if template is None else cls(_calls(template), _thinking(template))
        tools, reasoning = config.tool_parser, config.reasoning_parser
        opened = reasoning == "think-open"
        given = own.reasoning if reasoning == "auto" else "think" if opened else reasoning
        calls = own.tools if tools == "auto" else tools
        if _CHANNELS in (given, calls):  # they mark everything, or nothing
            calls, given = calls if calls == "none" else _CHANNELS, _CHANNELS
        shown = reasoning != "auto" or template is None or bool(_TAGS_SHOWN & set(template.thinking))
        return cls(calls, given, opened, shown)

    @property
    def channels(self) -> bool:
        """An answer is messages on channels, thinking and calls among them."""
        return self.reasoning == _CHANNELS

    def begins(self, request: ChatRequest, prompt: str) -> Begins:
        """Where the answer begins. prompt: the rendered conversation, or the end of it."""
        tags = TAGS.get(self.reasoning)
        if tags is None or self.begun(request) is not None:
            return "after"
        found = tags.begins(prompt)
        if found == "inside":
            return "inside"
        if request.continue_final_message:
            return "inside" if tags.left_open(request.messages[-1].text) else "after"
        variables = request.chat_template_kwargs or {}
        if found == "after" or any(variables.get(name) is False for name in _SWITCHES):
            return "after"
        return "inside" if self.opened else "before"

    def begun(self, request: ChatRequest) -> str | None:
        """The tool whose call the prompt begins."""
        return request.forced_tool if self.tools in FORMS and FORMS[self.tools].begun else None

    def may_think(self, request: ChatRequest) -> bool:
        return self.reasoning != "none" and self.begun(request) is None

    def keeps_special(self, request: ChatRequest) -> bool:
        """Markers of this answer may be special tokens, which the engine must leave in its text."""
        calls = bool(request.active_tools) and FORMS[self.tools].special
        return calls or self.channels or (self.may_think(request) and TAGS[self.reasoning].special)


def _calls(template: TemplateMarks) -> str:
    """A name of FORMS."""
    marks = set(template.calls)
    if "<|channel|>" in marks:
        return _CHANNELS
    if "<｜tool▁calls▁begin｜>" in marks:
        return "deepseek-v3" if "```json" in marks else "deepseek-v3.1"
    if "<|tool_calls_section_begin|>" in marks:
        return "kimi-k2"
    if "[TOOL_CALLS]" in marks:
        return "mistral"
    named = {"｜DSML｜": "deepseek-v3.2", "<|tool_call>": "gemma4", "<start_function_call>": "functiongemma"}
    for mark, form in named.items():
        if mark in marks:
            return form
    if {"<function=", "<parameter="} <= marks:
        return "qwen3-coder"
    if "<tool_call>" in marks:
        return "hermes"
    if "[func_name" in marks:
        return "pythonic"
    return "llama3" if "parameters" in marks and marks & _LLAMA else _TOOLS


def _thinking(template: TemplateMarks) -> str:
    """A name of TAGS, or `gpt-oss`."""
    marks = {"<|channel|>": _CHANNELS, "[THINK]": "mistral", "◁think▷": "kimi", "<|channel>": "gemma4"}
    return next((form for mark, form in marks.items() if mark in template.thinking), _THINKING)
