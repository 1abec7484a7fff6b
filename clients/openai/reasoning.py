"""The thinking of a reasoning model, split from its answer as it streams."""

from __future__ import annotations

from clients.openai.config import ReasoningParser
from clients.openai.tools import partial_suffix

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """`<think>...</think>` at the beginning of an answer is reasoning, the rest is content.

    form "think": the answer itself opens the tag. "think-open": the chat template has opened it already, so the
    answer begins inside. "none": everything is content.
    """

    def __init__(self, form: ReasoningParser) -> None:
        self._state = {"think": "before", "think-open": "inside", "none": "after"}[form]
        self._held = ""
        self._fresh = form != "none"  # nothing but white space since the last tag

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that this text adds."""
        if self._state == "after" and not self._held:
            return "", self._opening(text)
        text, self._held = self._held + text, ""
        if self._state == "before":
            body = text.lstrip()
            if OPEN.startswith(body):
                self._held = text
                if body != OPEN:
                    return "", ""
            if not body.startswith(OPEN):
                self._state, self._fresh = "after", False
                return "", text
            self._state, self._held, text = "inside", "", body[len(OPEN) :]
        reasoning, tag, content = text.partition(CLOSE)
        if tag:
            reasoning = self._opening(reasoning).rstrip()
            self._state, self._fresh = "after", True
            return reasoning, self._opening(content)
        keep = reasoning[: len(reasoning) - partial_suffix(reasoning, CLOSE)].rstrip()
        self._held = reasoning[len(keep) :]
        return self._opening(keep), ""

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (self._opening(held), "") if self._state == "inside" else ("", held)

    def _opening(self, text: str) -> str:
        """Without the white space that stands between a tag and what follows it."""
        if self._fresh and self._state != "before":
            text = text.lstrip("\n")
            self._fresh = not text
        return text
