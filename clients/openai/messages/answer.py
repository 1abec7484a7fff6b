"""POST /v1/messages, whole and streamed, and POST /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from clients.openai.chat import ChatCall, Choice
from clients.openai.deadline import Deadline
from clients.openai.encode import json_response
from clients.openai.errors import ApiError
from clients.openai.messages.blocks import Blocks, Event
from clients.openai.messages.errors import error_body
from clients.openai.messages.schema import CountRequest, MessagesRequest
from clients.openai.messages.translate import chat_request
from clients.openai.model_forms import ModelForms
from clients.openai.prompts import chat_source
from clients.openai.schema import ChatRequest
from clients.openai.shim import Shim
from clients.openai.stream import connected, start_stream
from clients.openai.tools import ToolParser
from clients.openai.trace import trace_of
from clients.openai.usage import Usage
from clients.openai.wire import Piece


async def create_message(shim: Shim, http: Request, request: MessagesRequest) -> Response:
    """The answer, or the stream once its first token is there. Raises ApiError, BackendError."""
    chat = chat_request(request)
    trace = trace_of(http)
    trace.model = chat.model
    trace.user = chat.user or "-"
    call = ChatCall(shim, chat, trace, _Choice)
    answer = _Answer(call)
    if request.stream:
        return await start_stream(http.receive, answer.events(), b"", lambda error: _failed(error, trace.request_id))
    async with connected(http.receive):
        body = await answer.whole()
    return json_response(body)


async def count_tokens(shim: Shim, http: Request, request: CountRequest) -> Response:
    """How many tokens the conversation takes of a context. Raises ApiError, BackendError."""
    chat = chat_request(request)
    info = shim.router.model(chat.model)
    deadline = Deadline.of(None, shim.config.request_timeout_s)
    async with connected(http.receive):
        source = await deadline.kept(chat_source(shim.router, info, chat, ModelForms.of(shim.config, info)))
    return json_response({"input_tokens": len(source.prompt.ids or ())})


class _Answer:
    """One answer: a chat choice's deltas as content blocks."""

    def __init__(self, call: ChatCall[_Choice]) -> None:
        self._call = call
        self._blocks = Blocks()
        self._id = f"msg_{uuid.uuid4().hex}"

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._events(stream=False)) as events:
            async for _ in events:
                pass
        return self._message(self._blocks.whole()) | {"usage": _usage(self._call.usage)} | self._end()

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._events(stream=True)) as events:
            async for made in events:
                head = b""
                if not begun:
                    begun = True
                    usage = _usage(self._call.usage) | {"output_tokens": 0}
                    head = _sse({"type": "message_start", "message": self._message([]) | {"usage": usage}})
                yield head + b"".join(map(_sse, made))
        yield _sse({"type": "message_delta", "delta": self._end(), "usage": _usage(self._call.usage)})
        yield _sse({"type": "message_stop"})

    async def _events(self, stream: bool) -> AsyncGenerator[list[Event], None]:
        """Events of content blocks, a list for each piece of the answer."""
        streamed = stream or self._call.cut_short
        async with aclosing(self._call.pieces(streamed)) as pieces:
            async for _, deltas in pieces:
                yield [event for delta in deltas for event in self._blocks.feed(delta)]
        yield list(self._blocks.close())

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._call.request.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _end(self) -> dict[str, Any]:
        choice = self._call.choices[0]
        met = choice.stop_sequence
        reason = self._blocks.stop_reason(choice.finish_reason, met)
        return {"stop_reason": reason, "stop_sequence": met if reason == "stop_sequence" else None}


class _Choice(Choice):
    """A chat choice whose text ends with the stop sequence that was met, if one was: it is taken off and kept.

    The engine holds back what may become a stop sequence, so a sequence comes in one piece, the last.
    """

    def __init__(self, request: ChatRequest, reader: ToolParser) -> None:
        super().__init__(request, reader)
        self._stops = sorted(request.stop or (), key=len, reverse=True)
        self.stop_sequence: str | None = None

    def feed(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.finish_reason == "stop":
            met = next((stop for stop in self._stops if piece.text.endswith(stop)), None)
            if met is not None:
                self.stop_sequence = met
                piece = msgspec.structs.replace(piece, text=piece.text[: -len(met)])
        return super().feed(piece)


def _usage(usage: Usage) -> dict[str, int]:
    counted = usage.body()
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }


def _sse(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _failed(error: ApiError, request_id: str) -> bytes:
    return _sse(error_body(error, request_id))
