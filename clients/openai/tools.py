"""Tool calls out of generated text, as it streams: the Qwen/Hermes form and the Llama 3 form.

Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a row.
Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, perhaps after <|python_tag|>, several joined by `;`.
Arguments are passed on as the model wrote them, character by character, without waiting for their end.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from clients.openai.call_scanner import CallScanner

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
_SEPARATORS = "; \n\t"  # between Llama's calls


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call's name is known. `index` counts the calls of one answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, a piece of JSON text."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | CallStart | CallArguments


class ToolParser(Protocol):
    """Splits one answer. `calls_done` counts calls whose end has been seen."""

    @property
    def calls_done(self) -> int: ...

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class Calls:
    """What forms share: numbering calls and turning a scanner's progress into deltas."""

    def __init__(self) -> None:
        self.calls_done = 0
        self._started = 0
        self._announced = False

    def _progress(self, scanner: CallScanner) -> list[Delta]:
        deltas: list[Delta] = []
        if scanner.name is not None and not self._announced:
            self._announced = True
            self._started += 1
            deltas.append(CallStart(self._started - 1, f"call_{uuid.uuid4().hex[:24]}", scanner.name))
        if self._announced:
            text = scanner.take_arguments()
            if text:
                deltas.append(CallArguments(self._started - 1, text))
        if scanner.done:
            self._ended()
        return deltas

    def _ended(self) -> None:
        self.calls_done += 1
        self._announced = False


class HermesParser(Calls):
    """Text around the tags is content; white space next to a tag is not."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._scanner: CallScanner | None = None
        self._closing = False  # a call has ended, its closing tag is still to come
        self._broken = False  # it broke off within its arguments: all that comes before the tag belongs to it

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            if self._scanner is not None:
                text = self._in_call(text, self._scanner, deltas)
            elif self._closing:
                text = self._after_call(text)
            else:
                text = self._in_content(text, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._scanner is None:
            return [] if self._started and not held.strip() else self._content(held)
        scanner, self._scanner = self._scanner, None
        return [] if self._announced else [ContentDelta(HERMES_OPEN + scanner.raw)]

    def _in_content(self, text: str, deltas: list[Delta]) -> str:
        before, tag, after = text.partition(HERMES_OPEN)
        if tag:
            deltas.extend(self._content(before.rstrip()))
            self._scanner = CallScanner()
            return after
        keep = before[: len(before) - partial_suffix(before, HERMES_OPEN)].rstrip()
        self._held = before[len(keep) :]
        deltas.extend(self._content(keep))
        return ""

    def _in_call(self, text: str, scanner: CallScanner, deltas: list[Delta]) -> str:
        scanner.feed(text)
        deltas.extend(self._progress(scanner))
        if not scanner.bad and not scanner.done:
            return ""
        self._scanner = None
        self._closing = scanner.done or self._announced
        self._broken = scanner.bad and not scanner.arguments_complete
        if self._announced:
            self._ended()
        elif scanner.bad:
            deltas.append(ContentDelta(HERMES_OPEN + scanner.raw))
        return scanner.rest

    def _after_call(self, text: str) -> str:
        if self._broken:
            _, tag, after = text.partition(HERMES_CLOSE)
            self._closing = not tag
            self._held = "" if tag else text[len(text) - partial_suffix(text, HERMES_CLOSE) :]
            return after
        body = text.lstrip("} \t\r\n")  # models miscount their brackets
        if HERMES_CLOSE.startswith(body) and body != HERMES_CLOSE:
            self._held = text
            return ""
        self._closing = False
        return body.removeprefix(HERMES_CLOSE)

    @staticmethod
    def _content(text: str) -> list[Delta]:
        return [ContentDelta(text)] if text else []


class LlamaParser(Calls):
    """An answer that begins with a call object of a known tool is calls; any other is content."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._held = ""
        self._scanner: CallScanner | None = None
        self._plain = False

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            if self._plain:
                deltas.append(ContentDelta(text))
                text = ""
            elif self._scanner is not None:
                text = self._in_call(text, self._scanner, deltas)
            else:
                text = self._between(text)
        return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._scanner is not None and not self._announced:
            held = self._scanner.raw
        self._scanner = None
        return [ContentDelta(held)] if held.strip(_SEPARATORS if self._started else None) else []

    def _between(self, text: str) -> str:
        body = text.lstrip(_SEPARATORS) if self._started else text.lstrip()
        body = body.removeprefix(LLAMA_TAG).lstrip()
        if not body or (LLAMA_TAG.startswith(body) and body != LLAMA_TAG):
            self._held = text
            return ""
        if body.startswith("{"):
            self._scanner = CallScanner()
            return body
        self._plain = True
        return text

    def _in_call(self, text: str, scanner: CallScanner, deltas: list[Delta]) -> str:
        scanner.feed(text)
        unknown = scanner.name is not None and scanner.name not in self._names
        if not unknown:
            deltas.extend(self._progress(scanner))
        if unknown or scanner.bad:
            self._scanner = None
            self._plain = True
            if self._announced:
                self._ended()
                return scanner.rest
            return scanner.raw + scanner.rest
        if scanner.done:
            self._scanner = None
            return scanner.rest
        return ""


class ForcedParser(Calls):
    """A named tool: the model was given the call up to its arguments' `{` and writes on from there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._scanner = CallScanner.inside_arguments(name)

    def feed(self, text: str) -> list[Delta]:
        if self.calls_done:
            return []
        self._scanner.feed(text)
        deltas = self._progress(self._scanner)
        if not self._scanner.done and (self._scanner.bad or self._scanner.arguments_complete):
            self._ended()
        return deltas

    def finish(self) -> list[Delta]:
        return [] if self._started else self._progress(self._scanner)


class PlainParser:
    """No tools: everything is content."""

    calls_done = 0

    def feed(self, text: str) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


def partial_suffix(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
