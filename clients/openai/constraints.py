"""What an answer must be, from a request's fields, and what a call of tools must be: the engine's constraints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from clients.openai.errors import invalid, unsupported
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
    elif any(tool.function.strict for tool in tools):
        made = Constraint(kind="grammar", text=calls_or_text(tools, config.tool_parser, constraint_of(request)))
    else:
        made = constraint_of(request)
    thinking = (request.chat_template_kwargs or {}).get("enable_thinking") is not False
    if made is None or not thinking or request.continue_final_message or config.reasoning_parser == "none":
        return made
    return msgspec.structs.replace(made, think="open" if config.reasoning_parser == "think-open" else "may")


def calls(tools: list[Tool], form: str, most: int) -> str:
    """A grammar of one to `most` calls of any of `tools`, in Lark's notation."""
    more = f" ({json.dumps(_BETWEEN[form])} call){{0,{most - 1}}}" if most > 1 else ""
    return "\n".join([f"start: call{more}", *_call_rules(tools, form)])


def calls_or_text(tools: list[Tool], form: str, content: Constraint | None) -> str:
    """A grammar of text in which each call keeps to its tool's schema, in Lark's notation. content: what the answer
    must be where it is no call; it says nothing of text beside calls then. Raises ApiError where the two do not go
    together."""
    rules = _call_rules(tools, form, behind=_TRIGGERS[form])
    between = json.dumps(_BETWEEN[form])
    if content is not None:
        if content.kind != "json" or form != "hermes":  # Llama's calls begin as other JSON does
            raise unsupported(
                "tools", "strict tools beside a format of the answer; a JSON schema goes with hermes' form."
            )
        schema = json.loads(content.text)
        if content.whitespace is not None and isinstance(schema, dict):
            schema["x-guidance"] = {"whitespace_flexible": bool(content.whitespace)}
        first = f"start: opened ({between} opened)* | content"
        return "\n".join(
            [first, f"opened: {json.dumps(_TRIGGERS[form])} call", f"content: %json {json.dumps(schema)}", *rules]
        )
    if form == "hermes":
        # A lazy terminal ends where the tag does, so text holds no tag that no call follows.
        rules += [f"trigger[lazy]: TEXT {json.dumps(_TRIGGERS[form])}", "TEXT: /(.|\\n)*/"]
        return "\n".join(["start: (trigger call)* rest", "rest: TEXT", *rules])
    # Calls in this form begin an answer, with a brace; any other beginning is text.
    return "\n".join([f"start: call ({between} call)* | rest", "rest: /([^{\\s](.|\\n)*)?/", *rules])


_BETWEEN = {"hermes": "\n", "llama3": "; "}
_TRIGGERS = {"hermes": "<tool_call>", "llama3": ""}


def _call_rules(tools: list[Tool], form: str, behind: str = "") -> list[str]:
    """Rules of `call`, any call of the tools, behind the beginning that all have."""
    closing = json.dumps("}\n</tool_call>" if form == "hermes" else "}")
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema: dict[str, Any] = tool.function.parameters or _ANY
        opening = json.dumps(forced_prefix(form, tool.function.name)[len(behind) : -1])  # up to its arguments
        rules += [f"call_{i}: {opening} arguments_{i} {closing}", f"arguments_{i}: %json {json.dumps(schema)}"]
    return rules
