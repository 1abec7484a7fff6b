"""gpt-oss: an answer is messages on channels, each with a header, in OpenAI's harmony format.

`<|channel|>analysis<|message|>` is thinking, `final` and `commentary` are text for the user, and a message to
`functions.NAME` is a call: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. The
recipient may stand before the channel as well. Messages end with `<|end|>`, `<|call|>` or `<|return|>`, and the next
begins with `<|start|>assistant`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection

from clients.openai.tools import CallArguments, CallStart, ContentDelta, Delta, ReasoningDelta, partial_suffix

START, MESSAGE = "<|start|>", "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, "<|channel|>")
_ROLE = "assistant"
_FIRST = ("<|", _ROLE, "to=")  # what a header begins with
_LONGEST_HEADER = 512


class HarmonyReader:
    """The messages of one answer.

    names: the tools that the model was shown. prompt: the end of the rendered conversation, in whose last message the
    answer goes on.
    """

    def __init__(self, names: Collection[str], prompt: str = "") -> None:
        self.calls_done = 0
        self._names = names
        self._held = ""
        self._started = 0
        self._kind = "header"  # header, reasoning, content, call
        self._silent = False  # the call has no arguments so far
        _, begun, head = prompt.rpartition(START)
        if not begun:
            self._kind = "content" if prompt else "header"
        elif MESSAGE in head:
            self._open(head.partition(MESSAGE)[0])
        else:
            self._held = head.removeprefix(_ROLE)

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            text = self._header(text, deltas) if self._kind == "header" else self._body(text, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        deltas = self._said(held) if self._kind != "header" else []
        return [*deltas, *self._close()]

    def _header(self, text: str, deltas: list[Delta]) -> str:
        head, found, body = text.partition(MESSAGE)
        bare = head.lstrip().removeprefix(_ROLE).lstrip()
        known = not bare or bare.startswith(_FIRST) or (not found and any(word.startswith(bare) for word in _FIRST))
        if not known or len(head) - partial_suffix(head, MESSAGE) > _LONGEST_HEADER:
            self._kind = "content"  # an answer without channels
            return text
        if not found:
            self._held = text
            return ""
        deltas += self._open(head)
        return body

    def _open(self, head: str) -> list[Delta]:
        """What begins behind a header."""
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        name = recipient[1] if recipient else ""
        if self._names and (name.startswith("functions.") or name in self._names):
            self._kind, self._silent = "call", True
            self._started += 1
            made = f"call_{uuid.uuid4().hex[:24]}"
            return [CallStart(self._started - 1, made, name.removeprefix("functions."))]
        thinks = channel is not None and channel[1] == "analysis"
        self._kind = "reasoning" if thinks or name else "content"
        return []

    def _body(self, text: str, deltas: list[Delta]) -> str:
        found = [(at, tag) for tag in _ENDS if (at := text.find(tag)) >= 0]
        if not found:
            keep = len(text) - max(partial_suffix(text, tag) for tag in _ENDS)
            self._held = text[keep:]
            deltas += self._said(text[:keep])
            return ""
        at, tag = min(found)
        deltas += self._said(text[:at])
        deltas += self._close()
        return text[at if tag == "<|channel|>" else at + len(tag) :]

    def _said(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._kind == "reasoning":
            return [ReasoningDelta(text)]
        if self._kind == "content":
            return [ContentDelta(text)]
        if self._silent:
            text = text.lstrip()
        if not text:
            return []
        self._silent = False
        return [CallArguments(self._started - 1, text)]

    def _close(self) -> list[Delta]:
        """The end of a message."""
        kind, self._kind = self._kind, "header"
        if kind != "call":
            return []
        self.calls_done += 1
        return [CallArguments(self._started - 1, "{}")] if self._silent else []
