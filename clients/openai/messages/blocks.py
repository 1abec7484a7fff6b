"""Content blocks of an answer, from the deltas of a chat choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

Event = dict[str, Any]

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
_SHOWN = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


class Blocks:
    """Deltas in, events of content blocks out. One block is open at a time."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._parts: list[str] = []  # of the open block
        self._open = False

    def feed(self, delta: dict[str, Any]) -> Iterator[Event]:
        if delta.get("reasoning_content"):
            yield from self._say("thinking", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._say("text", delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin(
                    {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                )
            if call["function"]["arguments"]:
                yield self._add({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def close(self) -> Iterator[Event]:
        """The end of the block that is open, if one is."""
        if not self._open:
            return
        self._open = False
        block, text = self._blocks[-1], "".join(self._parts)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[_SHOWN[block["type"]][0]] = text
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def whole(self) -> list[dict[str, Any]]:
        """Every block that was closed."""
        return self._blocks

    def stop_reason(self, finish_reason: str | None, stop_sequence: str | None) -> str:
        if finish_reason == "stop" and any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        if finish_reason == "stop" and stop_sequence is not None:
            return "stop_sequence"
        return _STOPS.get(finish_reason or "", "end_turn")

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        field, delta = _SHOWN[kind]
        if not self._open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, field: "", **signature})
        yield self._add({"type": delta, field: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._blocks.append(block)
        self._parts = []
        self._open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _add(self, delta: dict[str, Any]) -> Event:
        self._parts.append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _object(arguments: str) -> dict[str, Any]:
    """What the model wrote as a call's arguments; an answer that was cut short holds no whole object."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
