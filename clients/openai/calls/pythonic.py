"""Llama 4's Python calls, which are read once the answer is complete."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from typing import Any

from clients.openai.calls.blocks import WholeCalls
from clients.openai.tools import ContentDelta, Delta

_LONGEST_PYTHON = 1 << 16  # characters of an answer that is read as Python
_NAMES = {"true": True, "false": False, "null": None}


class PythonParser(WholeCalls):
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
        return self.made(_python(text, self._names)) or _content(text)


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []


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
