"""Calls that are read once they are complete: Qwen3-Coder's XML and Llama 4's Python calls."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from clients.openai.tools import CallArguments, CallStart, ContentDelta, Delta, partial_suffix

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)
_LONGEST_PYTHON = 1 << 16  # characters of an answer that is read as Python
_NAMES = {"true": True, "false": False, "null": None}


class _Whole:
    """Numbers calls that come whole."""

    def __init__(self) -> None:
        self.calls_done = 0

    def _made(self, name: str, arguments: dict[str, Any]) -> list[Delta]:
        index = self.calls_done
        self.calls_done += 1
        text = json.dumps(arguments, ensure_ascii=False)
        return [CallStart(index, f"call_{uuid.uuid4().hex[:24]}", name), CallArguments(index, text)]


class XmlParser(_Whole):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    schemas: each tool's parameters; a value is text where its schema says so, and JSON where it is that otherwise.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._held = ""
        self._inside = False

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            tag = _CLOSE if self._inside else _OPEN
            before, found, after = text.partition(tag)
            if self._inside and not found:
                self._held = text
                break
            if self._inside:
                deltas += self._read(before) or _content(_OPEN + before + _CLOSE)
            elif found:
                deltas += _content(before.rstrip())
            else:
                keep = before[: len(before) - partial_suffix(before, _OPEN)].rstrip()
                self._held = before[len(keep) :]
                deltas += _content(keep)
            self._inside = bool(found) and not self._inside
            text = after
        return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._inside:
            return self._read(held) or _content(_OPEN + held)
        return [] if self.calls_done and not held.strip() else _content(held)

    def _read(self, block: str) -> list[Delta]:
        match = _FUNCTION.fullmatch(block)
        if match is None:
            return []
        schema = self._schemas.get(match[1], {})
        properties = schema.get("properties")
        known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        pairs = _PARAMETER.findall(match[2])
        return self._made(match[1], {key: _value(text, known.get(key)) for key, text in pairs})


class PythonParser(_Whole):
    """`[name(key=value, ...), ...]` is the whole answer; any other answer is content."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._held: list[str] = []
        self._length = 0
        self._plain = False

    def feed(self, text: str) -> list[Delta]:
        if self._plain:
            return _content(text)
        self._held.append(text)
        self._length += len(text)
        head = "".join(self._held).lstrip()[:1] if self._length < 64 else "["
        if head in ("", "[", "<") and self._length <= _LONGEST_PYTHON:
            return []
        self._plain = True
        return _content("".join(self._held))

    def finish(self) -> list[Delta]:
        if self._plain:
            return []
        text = "".join(self._held)
        calls = _python(text, self._names)
        return [delta for name, arguments in calls for delta in self._made(name, arguments)] or _content(text)


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []


def _value(text: str, schema: object) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _python(text: str, names: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    try:
        tree = ast.parse(body, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(call, names) for call in tree.elts]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Raises ValueError for what is no call of a tool by keywords with literal values."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call by keywords")
    name = ast.unparse(call.func)
    if name not in names or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("not a call of a tool")
    arguments = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    json.dumps(arguments, allow_nan=False)  # sets and bytes are no JSON
    return name, arguments


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {str(_literal(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    try:
        value = ast.literal_eval(node)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if isinstance(value, (complex, bytes, set, frozenset, type(...))):
        raise ValueError("not a value of JSON")
    return value
