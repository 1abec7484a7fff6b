"""The thinking of a reasoning model, split from its answer as it streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clients.openai.tools import partial_suffix

Begins = Literal["before", "inside", "after"]  # an answer: its thinking may come, is open, or is over


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around thinking. special: special tokens, which the engine must leave in the text."""

    open: str
    close: str
    special: bool = False

    def begins(self, prompt: str) -> Begins:
        """Where an answer to `prompt`, or to the end of it, begins."""
        end = prompt.rstrip()
        if end.endswith(self.open.rstrip()):
            return "inside"
        return "after" if end.endswith(self.close) else "before"

    def left_open(self, text: str) -> bool:
        """Whether the beginning of an answer is thinking that goes on."""
        return text.rfind(self.open) > text.rfind(self.close)


TAGS = {
    "think": Tags("<think>", "</think>"),
    "mistral": Tags("[THINK]", "[/THINK]", special=True),
    "kimi": Tags("◁think▷", "◁/think▷"),
    "gemma4": Tags("<|channel>thought\n", "<channel|>", special=True),
}


class ReasoningSplitter:
    """What `tags` hold at the beginning of an answer is reasoning, the rest is content; without tags all is content."""

    def __init__(self, tags: Tags | None, begins: Begins = "before") -> None:
        self._open, self._close = ("", "") if tags is None else (tags.open, tags.close)
        self._state = "after" if tags is None else begins
        self._held = ""
        self._fresh = self._state != "after"  # nothing but white space since the last tag

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that this text adds."""
        if self._state == "after" and not self._held:
            return "", self._opening(text)
        text, self._held = self._held + text, ""
        if self._state == "before":
            body = text.lstrip()
            if self._open.startswith(body):
                self._held = text
                if body != self._open:
                    return "", ""
            if not body.startswith(self._open):
                self._state, self._fresh = "after", False
                return "", text
            self._state, self._held, text = "inside", "", body[len(self._open) :]
        reasoning, tag, content = text.partition(self._close)
        if tag:
            reasoning = self._opening(reasoning).rstrip()
            self._state, self._fresh = "after", True
            return reasoning, self._opening(content)
        keep = reasoning[: len(reasoning) - partial_suffix(reasoning, self._close)].rstrip()
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
