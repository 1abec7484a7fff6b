"""Output items of a response, from the deltas of a chat choice."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

Event = dict[str, Any]

# kind of item: (name in events, type of its content part)
_TEXTS = {"message": ("output_text", "output_text"), "reasoning": ("reasoning_text", "reasoning_text")}


class Items:
    """Deltas in, events out, without their sequence numbers. One item is open at a time."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._parts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    @property
    def begun(self) -> bool:
        return self._item is not None or bool(self.done)

    def feed(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """logprobs: of the delta's tokens, when the delta is text."""
        if delta.get("reasoning_content"):
            yield from self._say("reasoning", delta["reasoning_content"], ())
        if delta.get("content"):
            yield from self._say("message", delta["content"], logprobs)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin_call(call["id"], call["function"]["name"])
            if call["function"]["arguments"]:
                self._parts.append(call["function"]["arguments"])
                delta_event = "response.function_call_arguments.delta"
                yield self._of_item(delta_event, delta=call["function"]["arguments"])

    def add_logprobs(self, logprobs: Sequence[dict[str, Any]]) -> None:
        """Of tokens without a text of their own, such as the one that ended the answer."""
        self._logprobs += logprobs

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The end of the item that is open, if one is."""
        item = self._item
        if item is None:
            return
        text = "".join(self._parts)
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._of_item("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            name, _ = _TEXTS[item["type"]]
            said = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            yield self._of_item(f"response.{name}.done", content_index=0, text=text, **said)
            part = self._part(item["type"], text)
            item["content"] = [part]
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": dict(item)}
        self.done.append(item)
        self._item = None

    def _say(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        if self._item is None or self._item["type"] != kind:
            yield from self.close()
            if kind == "message":
                yield self._begin({"type": kind, "id": _new("msg"), "role": "assistant", "content": []})
            else:
                yield self._begin({"type": kind, "id": _new("rs"), "summary": [], "content": []})
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(kind, ""))
        name, _ = _TEXTS[kind]
        self._parts.append(text)
        said: dict[str, Any] = {}
        if kind == "message":
            self._logprobs += logprobs
            said["logprobs"] = list(logprobs)
        yield self._of_item(f"response.{name}.delta", content_index=0, delta=text, **said)

    def _begin_call(self, call_id: str, name: str) -> Iterator[Event]:
        yield from self.close()
        call = {"type": "function_call", "id": _new("fc"), "call_id": call_id, "name": name, "arguments": ""}
        yield self._begin(call)

    def _begin(self, item: dict[str, Any]) -> Event:
        self._item = {**item, "status": "in_progress"}
        self._parts, self._logprobs = [], []
        return {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self._item)}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TEXTS[kind][1], "text": text}
        if kind == "message":
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.done), **fields}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
