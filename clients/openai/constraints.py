"""What an answer must be, from a request's fields, and what a call of tools must be: the engine's constraints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from clients.openai.errors import invalid
from clients.openai.tools import forced_prefix
from engine.serving import constraint_fields
from engine.types import Constraint, RequestError

if TYPE_CHECKING:
    from clients.openai.config import ShimConfig
    from clients.openai.schema import ChatRequest, Sampling, Tool

FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
)
MOST_CALLS = 16  # of tools, in one answer that must be calls
_ANY = {"type": "object"}


def constraint_of(request: Sampling) -> Constraint | None:
    """What the answer must be. Raises ApiError for what cannot be honoured."""
    asked = {name: value for name in FIELDS if (value := getattr(request, name)) is not None}
    if not asked:
        return None
    if request.response_format is not None:
        asked["response_format"] = request.response_format.model_dump(exclude_none=True)
    try:
        return constraint_fields.taken(asked)[0]
    except RequestError as error:
        named = next((name for name in FIELDS if error.message.startswith(name)), next(iter(asked)))
        raise invalid(named, f"{error.message}.") from None


def chat_constraint(request: ChatRequest, config: ShimConfig) -> Constraint | None:
    """What a chat answer must be: calls, where tools must be called, or what its fields say behind its thinking."""
    forced = request.forced_tool
    tools = [tool for tool in request.active_tools if forced in (None, tool.function.name)]
    if forced is not None:
        prefix = forced_prefix(config.tool_parser, forced)
        return Constraint(kind="grammar", text=calls(tools, config.tool_parser, 1), prefix=prefix)
    if request.tool_choice == "required":
        most = 1 if request.parallel_tool_calls is False else MOST_CALLS
        made: Constraint | None = Constraint(kind="grammar", text=calls(tools, config.tool_parser, most))
    else:
        made = constraint_of(request)
    thinking = (request.chat_template_kwargs or {}).get("enable_thinking") is not False
    if made is None or not thinking or request.continue_final_message or config.reasoning_parser == "none":
        return made
    return msgspec.structs.replace(made, think="open" if config.reasoning_parser == "think-open" else "may")


def calls(tools: list[Tool], form: str, most: int) -> str:
    """A grammar of one to `most` calls of any of `tools`, in Lark's notation."""
    closing, between = ("}\n</tool_call>", "\n") if form == "hermes" else ("}", "; ")
    more = f" ({json.dumps(between)} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema: dict[str, Any] = tool.function.parameters or _ANY
        rules.append(f"call_{i}: {json.dumps(_opening(form, tool.function.name))} arguments_{i} {json.dumps(closing)}")
        rules.append(f"arguments_{i}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def _opening(form: str, name: str) -> str:
    """A call up to its arguments."""
    return forced_prefix(form, name)[:-1]
