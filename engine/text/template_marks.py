"""What the text of a checkpoint's chat template shows of the answers that its model writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Text that tells forms of tool calls and of thinking from each other.
_MARKS = (
    "<｜tool▁calls▁begin｜>",
    "```json",
    "<|tool_calls_section_begin|>",
    "[TOOL_CALLS]",
    "｜DSML｜",
    "<|tool_call>",
    "<start_function_call>",
    "<|channel|>",
    "<tool_call>",
    "<function=",
    "<parameter=",
    "<|start_header_id|>",
    "<|header_start|>",
    "<|python_tag|>",
    "parameters",
    "[func_name",  # templates tell a model so to write calls as Python's
    "<think>",
    "</think>",
    "[THINK]",
    "◁think▷",
    "<|channel>",
)


@dataclass(frozen=True, slots=True)
class TemplateMarks:
    """calls, thinking: the marks in the template for requests with tools, and in the one for others."""

    calls: tuple[str, ...] = ()
    thinking: tuple[str, ...] = ()


def template_marks(templates: Mapping[str, str]) -> TemplateMarks:
    """templates: a checkpoint's chat templates by name. Nothing is rendered: a template computes what it likes."""
    default = templates.get("default", "")
    return TemplateMarks(_marks(templates.get("tool_use", default)), _marks(default))


def _marks(source: str) -> tuple[str, ...]:
    return tuple(mark for mark in _MARKS if mark in source)
