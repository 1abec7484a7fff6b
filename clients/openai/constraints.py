"""What an answer must be, from a request's fields, and what a call of tools must be: the engine's constraints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from clients.openai.calls.forms import FORMS
from clients.openai.errors import invalid, unsupported
from clients.openai.reasoning import TAGS
from engine.serving.frontend import constraint_fields
from engine.types import Constraint, RequestError

if TYPE_CHECKING:
    from clients.openai.model_forms import ModelForms
    from clients.openai.reasoning import Begins
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
MAX_CALLS = 16  # of tools, in one answer that must be calls
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


def chat_constraint(request: ChatRequest, forms: ModelForms, begins: Begins) -> Constraint | None:
    """What a chat answer must be: calls, where tools must be called, or what its fields say behind its thinking.

    begins: where the answer does. Raises ApiError for what cannot be honoured.
    """
    forced = request.forced_tool
    tools = [tool for tool in request.active_tools if forced in (None, tool.function.name)]
    strict = any(tool.function.strict for tool in tools)
    if forced is not None or request.tool_choice == "required" or strict:
        _check_form(forms.tools, forced is not None, strict and forced is None)
    if forced is not None:
        prefix = FORMS[forms.tools].prefix(forced)
        return Constraint(kind="grammar", text=calls(tools, forms.tools, 1), prefix=prefix)
    if request.tool_choice == "required":
        most = 1 if request.parallel_tool_calls is False else MAX_CALLS
        made: Constraint | None = Constraint(kind="grammar", text=calls(tools, forms.tools, most))
    elif strict:
        made = Constraint(kind="grammar", text=calls_or_text(tools, forms.tools, constraint_of(request)))
    else:
        made = constraint_of(request)
    budget = request.thinking_token_budget
    if budget is not None and forms.channels:
        raise unsupported("thinking_token_budget", "a channel of gpt-oss is not closed for the model.")
    tags = TAGS.get(forms.reasoning)
    if tags is None or begins == "after" or (made is None and budget is None):
        return made
    where = {
        "think": "open" if begins == "inside" else "may",
        "tags": (tags.open, tags.close),
        "think_tokens": budget,
    }
    if made is None:
        return Constraint(kind="free", **where)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, **where)


def calls(tools: list[Tool], form: str, most: int) -> str:
    """A grammar of one to `most` calls of any of `tools`, in Lark's notation."""
    made = FORMS[form]
    more = f" ({json.dumps(made.between)} call){{0,{most - 1}}}" if most > 1 else ""
    begin, end = json.dumps(made.begin), json.dumps(made.end)
    return "\n".join([f"start: {begin} call{more} {end}", *_call_rules(tools, form)])


def calls_or_text(tools: list[Tool], form: str, content: Constraint | None) -> str:
    """A grammar of text in which each call keeps to its tool's schema, in Lark's notation. content: what the answer
    must be where it is no call; it says nothing of text beside calls then. Raises ApiError where the two do not go
    together."""
    rules = _call_rules(tools, form, behind=_trigger(form))
    made = FORMS[form]
    between = json.dumps(made.between)
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
            [first, f"opened: {json.dumps(made.trigger)} call", f"content: %json {json.dumps(schema)}", *rules]
        )
    if made.trigger:
        # A lazy terminal ends where the tag does, so text holds no tag that no call follows.
        rules += [f"trigger[lazy]: TEXT {json.dumps(made.trigger)}", "TEXT: /(.|\\n)*/"]
        one = "call"
        if made.begin:
            one = f"call ({between} call){{0,{MAX_CALLS - 1}}} {json.dumps(made.end)}"
        return "\n".join([f"start: (trigger {one})* rest", "rest: TEXT", *rules])
    # Calls in this form begin an answer, with a brace; any other beginning is text.
    return "\n".join([f"start: call ({between} call)* | rest", "rest: /([^{\\s](.|\\n)*)?/", *rules])


def _check_form(form: str, forced: bool, strict: bool) -> None:
    """Raises ApiError where calls of this form cannot be begun for the model or held to a schema."""
    made = FORMS.get(form)
    if made is None or made.constrained or (forced and made.opening):
        return
    field = "tools" if strict else "tool_choice"
    asked = "strict tools" if strict else "a tool that must be called"
    raise unsupported(
        field,
        f'{asked}: calls in the form {form} cannot be held to a grammar. Use `tool_choice` "auto" without `strict`.',
    )


def _trigger(form: str) -> str:
    """The part of a call that its text rule takes."""
    made = FORMS[form]
    return "" if made.begin else made.trigger


def _call_rules(tools: list[Tool], form: str, behind: str = "") -> list[str]:
    """Rules of `call`, any call of the tools, behind the beginning that all have."""
    made = FORMS[form]
    closing = json.dumps(made.closing)
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema: dict[str, Any] = tool.function.parameters or _ANY
        opening = made.rule(tool.function.name).replace(json.dumps(behind)[:-1], '"', 1)
        rules += [f"call_{i}: {opening} arguments_{i} {closing}", f"arguments_{i}: %json {json.dumps(schema)}"]
    return rules
