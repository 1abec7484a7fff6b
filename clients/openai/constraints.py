"""What an answer must be, from a request's fields, and what a call of tools must be: the engine's constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from clients.openai.calls.forms import FORMS
from clients.openai.calls.wanted import MAX_CALLS, calls, calls_or_text
from clients.openai.errors import invalid, unsupported
from clients.openai.reasoning import TAGS
from engine.serving.frontend import constraint_fields
from engine.types import Constraint, RequestError

if TYPE_CHECKING:
    from clients.openai.model_forms import ModelForms
    from clients.openai.reasoning import Begins
    from clients.openai.schema import ChatRequest, Sampling

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
    if forms.begun(request) is not None:
        return msgspec.structs.replace(calls(tools, forms.tools, 1), prefix=FORMS[forms.tools].prefix(str(forced)))
    if forced is not None or request.tool_choice == "required":
        one = forced is not None or request.parallel_tool_calls is False
        made: Constraint | None = calls(tools, forms.tools, 1 if one else MAX_CALLS)
    elif any(tool.function.strict for tool in tools):
        made = calls_or_text(tools, forms.tools, constraint_of(request))
    else:
        made = constraint_of(request)
    budget = request.thinking_token_budget
    if budget is not None and forms.channels:
        raise unsupported("thinking_token_budget", "a channel of gpt-oss is not closed for the model.")
    tags = TAGS.get(forms.reasoning)
    if tags is None or begins == "after" or (made is None and budget is None):
        return made
    if made is not None and begins == "before" and not forms.shown:
        return made
    where = {
        "think": "open" if begins == "inside" else "may",
        "tags": (tags.open, tags.close),
        "think_tokens": budget,
    }
    if made is None:
        return Constraint(kind="free", **where)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, **where)
