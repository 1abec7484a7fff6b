"""Calls with a header and JSON arguments, between markers: DeepSeek V3 and V3.1, Kimi K2, Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clients.openai.call_scanner import CallScanner
from clients.openai.tools import Calls, ContentDelta, Delta, partial_suffix

_LONGEST_HEADER = 512  # characters between a call's marker and its arguments


@dataclass(frozen=True, slots=True)
class Section:
    """Markers of a form.

    begin, end: around all calls of an answer; end "" is the end of the answer.
    call: before a call's header; "" where `begin` itself is.
    header: a call's header up to and with its arguments' brace, with the name as its group.
    listed: `begin` may be followed by a JSON list of calls as well.
    """

    begin: str
    end: str
    call: str
    header: re.Pattern[str]
    listed: bool = False


DEEPSEEK_V3 = Section(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    re.compile(r"[^｜]*<｜tool▁sep｜>\s*([^\s{]+)\s*```json\s*\{"),
)
DEEPSEEK_V31 = Section(
    DEEPSEEK_V3.begin, DEEPSEEK_V3.end, DEEPSEEK_V3.call, re.compile(r"\s*([^\s{<]+)\s*<｜tool▁sep｜>\s*\{")
)
KIMI_K2 = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    re.compile(r"\s*(?:functions\.)?([^\s{<:]+):?\d*\s*<\|tool_call_argument_begin\|>\s*\{"),
)
MISTRAL = Section(
    "[TOOL_CALLS]", "", "", re.compile(r"\s*([^\s{\[]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*\{"), listed=True
)


class SectionParser(Calls):
    """Text before the calls is content. A section that holds no call that can be read is content as well."""

    def __init__(self, section: Section) -> None:
        super().__init__()
        self._section = section
        self._held = ""
        self._state = "text"  # text, between, header, list, call
        self._raw = ""  # what would be content again: a section in which no call has begun
        self._scanner: CallScanner | None = None
        self._in_list = False

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        step = {
            "text": self._text,
            "between": self._between,
            "header": self._header,
            "list": self._list,
            "call": self._call,
        }
        while text:
            text = step[self._state](text, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._scanner is not None:
            held = "" if self._announced else self._scanner.raw
        elif self._state != "text" and self._started:
            held = ""
        held, self._raw = self._raw + held, ""
        return [] if self._started and not held.strip() else _content(held)

    def _text(self, text: str, deltas: list[Delta]) -> str:
        begin = self._section.begin
        before, tag, after = text.partition(begin)
        if tag:
            deltas.extend(_content(before.rstrip()))
            self._raw = "" if self._started else begin
            self._state = "between" if self._section.call else "header"
            return after
        keep = before[: len(before) - partial_suffix(before, begin)].rstrip()
        self._held = before[len(keep) :]
        deltas.extend(_content(keep))
        return ""

    def _between(self, text: str, deltas: list[Delta]) -> str:
        """What stands between calls is dropped once there is one."""
        section = self._section
        found = [(at, tag) for tag in (section.call, section.end) if (at := text.find(tag)) >= 0]
        if not found:
            keep = len(text) - max(partial_suffix(text, section.call), partial_suffix(text, section.end))
            if not self._started:
                self._raw += text[:keep]
            self._held = text[keep:]
            return ""
        at, tag = min(found)
        if not self._started:
            self._raw += text[: at + len(tag)]
        if tag == section.call:
            self._state = "header"
        else:
            self._to_text(deltas)
        return text[at + len(tag) :]

    def _header(self, text: str, deltas: list[Delta]) -> str:
        if self._section.listed and text.lstrip().startswith("["):
            self._state = "list"
            return text
        brace = text.find("{", 0, _LONGEST_HEADER)
        if brace < 0 and len(text) < _LONGEST_HEADER:
            self._held = text
            return ""
        match = self._section.header.fullmatch(text, 0, brace + 1)
        if match is None:
            self._to_text(deltas)
            return text
        self._raw = ""
        self._scanner, self._in_list = CallScanner.inside_arguments(match[1]), False
        self._state = "call"
        deltas.extend(self._progress(self._scanner))
        return text[brace + 1 :]

    def _list(self, text: str, deltas: list[Delta]) -> str:
        body = text.lstrip("[, \n\t")
        if not self._started:
            self._raw += text[: len(text) - len(body)]
        if body.startswith("{"):
            self._scanner, self._in_list, self._state = CallScanner(), True, "call"
        elif body:
            self._to_text(deltas)
            return body.removeprefix("]") if self._started else body
        return body

    def _call(self, text: str, deltas: list[Delta]) -> str:
        scanner = self._scanner
        assert scanner is not None
        scanner.feed(text)
        deltas.extend(self._progress(scanner))
        if self._started:
            self._raw = ""
        ended = scanner.done or scanner.bad or (not self._in_list and scanner.arguments_complete)
        if not ended:
            return ""
        self._scanner = None
        if self._announced:
            self._ended()
        if self._in_list:
            self._state = "list"
            if scanner.bad and not scanner.done:
                self._raw += "" if self._started else scanner.raw
                self._to_text(deltas)
        else:
            self._state = "between" if self._section.call else "text"
        return scanner.rest

    def _to_text(self, deltas: list[Delta]) -> None:
        deltas.extend(_content(self._raw))
        self._raw, self._state = "", "text"


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []
