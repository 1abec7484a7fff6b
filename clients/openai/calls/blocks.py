"""Calls between two markers, read once the closing one is there: Qwen3-Coder's XML, DeepSeek's DSML, Gemma's."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from clients.openai.calls import gemma
from clients.openai.tools import CallArguments, CallStart, ContentDelta, Delta, partial_suffix

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)
_DSML = "｜DSML｜"
_INVOKE = re.compile(rf'<{_DSML}invoke name="([^"]*)">(.*?)</{_DSML}invoke>', re.DOTALL)
_DSML_PARAMETER = re.compile(
    rf'<{_DSML}parameter name="([^"]*)"(?: string="(true|false)")?>(.*?)</{_DSML}parameter>', re.DOTALL
)

_MAX_REFERENCES = 16  # one behind the other

Call = tuple[str, Mapping[str, Any]]


class WholeCalls:
    """Numbers calls that come whole."""

    def __init__(self) -> None:
        self.calls_done = 0

    def made(self, calls: Sequence[Call]) -> list[Delta]:
        deltas: list[Delta] = []
        for name, arguments in calls:
            index = self.calls_done
            self.calls_done += 1
            text = json.dumps(arguments, ensure_ascii=False)
            deltas += [CallStart(index, f"call_{uuid.uuid4().hex[:24]}", name), CallArguments(index, text)]
        return deltas


class BlockParser(WholeCalls, ABC):
    """Text outside of blocks is content, white space before one is not. A block without a call that can be read is
    content as well.

    opening: what a block begins with; closing: what it may end with.
    """

    opening: str
    closing: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._inside = False
        self._block: list[str] = []

    @abstractmethod
    def read(self, block: str) -> list[Call]:
        """The calls between two markers."""

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            text = self._in_block(text, deltas) if self._inside else self._outside(text, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._inside:
            block, self._inside = "".join([*self._block, held]), False
            return self.made(self.read(block)) or _content(self.opening + block)
        return [] if self.calls_done and not held.strip() else _content(held)

    def _outside(self, text: str, deltas: list[Delta]) -> str:
        before, found, after = text.partition(self.opening)
        if found:
            deltas += _content(before.rstrip())
            self._inside = True
            return after
        keep = before[: len(before) - partial_suffix(before, self.opening)].rstrip()
        self._held = before[len(keep) :]
        deltas += _content(keep)
        return ""

    def _in_block(self, text: str, deltas: list[Delta]) -> str:
        found = [(at, tag) for tag in self.closing if (at := text.find(tag)) >= 0]
        if not found:
            # Only what may be the beginning of a marker is looked at again: a block is read in time that grows with it.
            keep = len(text) - max(partial_suffix(text, tag) for tag in self.closing)
            self._block.append(text[:keep])
            self._held = text[keep:]
            return ""
        at, tag = min(found)
        block = "".join([*self._block, text[:at]])
        self._block, self._inside = [], False
        deltas += self.made(self.read(block)) or _content(self.opening + block + tag)
        return text[at + len(tag) :]


class XmlParser(BlockParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    schemas: each tool's parameters; a value is text where its schema says so, and JSON where it is that otherwise.
    """

    opening, closing = "<tool_call>", ("</tool_call>",)

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas

    def read(self, block: str) -> list[Call]:
        match = _FUNCTION.fullmatch(block)
        if match is None:
            return []
        schema = self._schemas.get(match[1], {})
        properties = _resolved(schema, schema).get("properties")
        known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        pairs = _PARAMETER.findall(match[2])
        return [(match[1], {key: _value(text, _resolved(known.get(key), schema)) for key, text in pairs})]


class DsmlParser(BlockParser):
    """`<｜DSML｜function_calls>` (V3.2) or `<｜DSML｜tool_calls>` (V4) around `<｜DSML｜invoke name="NAME">` with
    `<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>`; what is no string is JSON."""

    opening, closing = f"<{_DSML}", (f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>")

    def read(self, block: str) -> list[Call]:
        return [
            (
                name,
                {key: text if string == "true" else _json(text) for key, string, text in _DSML_PARAMETER.findall(body)},
            )
            for name, body in _INVOKE.findall(block)
            if name
        ]


class GemmaParser(BlockParser):
    """Gemma 4: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:5}<tool_call|>`."""

    opening, closing = "<|tool_call>", ("<tool_call|>",)
    quote = '<|"|>'

    def read(self, block: str) -> list[Call]:
        call = gemma.call(block, self.quote)
        return [] if call is None else [call]


class FunctionGemmaParser(GemmaParser):
    """FunctionGemma: `<start_function_call>call:NAME{KEY:<escape>TEXT<escape>}<end_function_call>`."""

    opening, closing = "<start_function_call>", ("<end_function_call>",)
    quote = "<escape>"


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = isinstance(choices, list) and bool(choices) and all(isinstance(choice, str) for choice in choices)
    return text if schema.get("type") == "string" or texts else _json(text)


def _resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or what it refers to within `root`."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
