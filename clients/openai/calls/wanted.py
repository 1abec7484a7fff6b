"""Calls that must come, or must fit their tools where they come, as structural tags in a form's own notation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from clients.openai.calls.forms import FORMS, Form
from clients.openai.errors import invalid, unsupported_in
from engine.types import MAX_CONSTRAINT_BYTES, Constraint

if TYPE_CHECKING:
    from clients.openai.schema import Tool

MAX_CALLS = 16  # of tools, in one answer that must be calls
_ANY = {"type": "object"}
_TEXT = {"type": "any_text"}
_START = "<|start|>assistant"
_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")

Format = dict[str, Any]


def calls(tools: list[Tool], form: str, most: int) -> Constraint:
    """An answer of one to `most` calls of any of `tools`."""
    made = FORMS[form]
    _check(tools, made)
    if made.channels:
        return _constraint(_sequence(_thoughts("analysis"), _either([_call(made, tool) for tool in tools])))
    return _constraint(_all_calls(tools, made, most))


def calls_or_text(tools: list[Tool], form: str, content: Constraint | None) -> Constraint:
    """Text in which each call keeps to its tool's schema. content: what the answer must be where it is no call; it says
    nothing of text beside calls then. Raises ApiError where the two do not go together."""
    made = FORMS[form]
    _check(tools, made)
    if content is not None:
        if content.kind != "json" or not made.trigger:  # other calls begin as JSON does
            raise unsupported_in(
                "tools", "strict tools beside a format of the answer; a JSON schema goes with calls that have a marker."
            )
        schema = json.loads(content.text)
        if content.whitespace is not None and isinstance(schema, dict):
            schema["x-guidance"] = {"whitespace_flexible": bool(content.whitespace)}
        answer = {"type": "json_schema", "json_schema": schema}
        return _constraint(_either([_all_calls(tools, made, MAX_CALLS), answer]))
    if made.channels:
        final = {"type": "any_text", "excludes": list(_MARKS)}
        said = _sequence(_const("<|channel|>final<|message|>"), final)
        call = _either([_call(made, tool) for tool in tools])
        return _constraint(_sequence(_thoughts("analysis", "commentary"), _either([call, said])))
    if not made.trigger:
        # Calls in this form begin an answer, with a mark of their own; any other beginning is text.
        text = {"type": "regex", "pattern": f"([^\\{made.first}\\s](.|\\n)*)?"}
        return _constraint(_either([_all_calls(tools, made, MAX_CALLS), text]))
    rules: list[Any] = []
    for block in made.blocks:
        trigger = made.in_block(made.trigger, block)
        whole = _block(tools, made, block, MAX_CALLS if made.begin else 1, trigger)
        rules.append([trigger, whole])
    return _constraint({"type": "dispatch", "rules": rules})


def _all_calls(tools: list[Tool], made: Form, most: int) -> Format:
    whole = _either([_block(tools, made, block, most) for block in made.blocks])
    return _sequence({"type": "optional", "content": _const(made.lead)}, whole) if made.lead else whole


def _block(tools: list[Tool], made: Form, block: str, most: int, begun: str = "") -> Format:
    """Calls and what is around all of them. begun: the text that stands already."""
    begin = made.in_block(made.begin, block)
    one = _either([_call(made, tool) for tool in tools])
    first = one if begin or not begun else _either([_call(made, tool, begun) for tool in tools])
    more = {"type": "repeat", "min": 0, "max": most - 1, "content": _sequence(_const(made.between), one)}
    return _sequence(
        _const(begin.removeprefix(begun)),
        first,
        more if most > 1 else _const(""),
        _const(made.in_block(made.end, block)),
    )


def _call(made: Form, tool: Tool, begun: str = "") -> Format:
    schema: Any = tool.function.parameters or _ANY
    arguments = {"type": "json_schema", "json_schema": schema, "style": made.style}
    opening = made.named(tool.function.name).removeprefix(begun).split(made.number)
    parts: list[Format] = [_const(opening[0])]
    for part in opening[1:]:
        parts += [{"type": "regex", "pattern": "[0-9]{1,2}"}, _const(part)]
    return _sequence(*parts, arguments, _const(made.closing))


def _thoughts(*channels: str) -> Format:
    """Messages before the one that counts."""
    tags = [
        {"type": "tag", "begin": f"<|channel|>{channel}<|message|>", "content": _TEXT, "end": "<|end|>"}
        for channel in channels
    ]
    return {"type": "star", "content": _sequence(_either(tags), _const(_START))}


def _check(tools: list[Tool], made: Form) -> None:
    for tool in tools:
        if made.style == "python" and not all(part.isidentifier() for part in tool.function.name.split(".")):
            raise unsupported_in(
                "tools", f"{tool.function.name!r} is no name in Python, in which this model writes its calls."
            )


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": [each for each in elements if each != _const("")]}


def _either(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _constraint(format: Format) -> Constraint:
    try:
        return Constraint(kind="structural_tag", text=json.dumps({"format": format}))
    except ValueError:
        sentence = f"The schemas of `tools` are too large together: calls are held to {MAX_CONSTRAINT_BYTES} bytes."
        raise invalid("tools", sentence) from None
