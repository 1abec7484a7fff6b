"""POST /v1/responses, whole and streamed, and what is kept of it."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from clients.openai.chat import ChatCall, Choice, Message
from clients.openai.deadline import Deadline
from clients.openai.encode import json_response
from clients.openai.errors import ApiError, invalid, unsupported
from clients.openai.logprobs import chat_logprobs
from clients.openai.model_forms import ModelForms
from clients.openai.params import check_length
from clients.openai.prompts import chat_source
from clients.openai.responses.items import Event, Items
from clients.openai.responses.schema import ResponsesRequest
from clients.openai.responses.store import ResponseStore, Stored
from clients.openai.responses.translate import ChatMessage, chat_request, input_messages
from clients.openai.shim import Shim
from clients.openai.stream import connected, start_stream
from clients.openai.trace import Trace, trace_of
from clients.openai.usage import Usage
from clients.openai.wire import Piece


async def create_response(shim: Shim, store: ResponseStore, http: Request, request: ResponsesRequest) -> Response:
    """The answer, or the stream once its first token is there. Raises ApiError, BackendError."""
    trace = trace_of(http)
    trace.model = request.model
    trace.user = request.safety_identifier or request.user or "-"
    if request.store and not store.most:
        raise unsupported("store", "this server was started with --stored-responses 0.")
    earlier = await _earlier(shim, store, http, request)
    chat = chat_request(request, earlier)
    check_length(shim.router.model(request.model), "max_output_tokens", request.max_output_tokens)
    call = ChatCall(shim, chat, trace, Choice)
    answer = _Answer(call, store, request, earlier, owner(shim, trace))
    if request.stream:
        return await start_stream(http.receive, answer.events(), b"", answer.failed)
    async with connected(http.receive):
        body = await answer.whole()
    return json_response(body)


async def count_input(shim: Shim, store: ResponseStore, http: Request, request: ResponsesRequest) -> Response:
    """How many tokens the conversation takes of a context. Raises ApiError, BackendError."""
    chat = chat_request(request, await _earlier(shim, store, http, request))
    info = shim.router.model(chat.model)
    deadline = Deadline.of(None, shim.config.request_timeout_s)
    async with connected(http.receive):
        source = await deadline.kept(chat_source(shim.router, info, chat, ModelForms.of(shim.config, info)))
    return json_response({"object": "response.input_tokens", "input_tokens": len(source.prompt.ids or ())})


async def _earlier(shim: Shim, store: ResponseStore, http: Request, request: ResponsesRequest) -> list[ChatMessage]:
    if request.previous_response_id is None:
        return []
    return (await find(shim, store, http, request.previous_response_id, "previous_response_id")).messages


async def find(shim: Shim, store: ResponseStore, http: Request, response_id: str, param: str = "response_id") -> Stored:
    """Raises ApiError 404 when the caller has no such response, or has it no more."""
    stored = await store.get(response_id, owner(shim, trace_of(http)))
    if stored is None:
        sentence = f"No response with the id `{response_id}` is kept here: the last {store.most} of them are."
        raise ApiError(404, sentence, param=param, code="previous_response_not_found")
    return stored


def owner(shim: Shim, trace: Trace) -> str:
    """Whose responses are whose: a key's where there are keys, everybody's where there are none."""
    return trace.caller if shim.config.api_keys else ""


class _Answer:
    """One response: a chat choice's deltas as output items."""

    def __init__(
        self,
        call: ChatCall[Choice],
        store: ResponseStore,
        request: ResponsesRequest,
        earlier: list[ChatMessage],
        whose: str,
    ) -> None:
        self._call = call
        self._store = store if request.store is not False and store.most else None
        self._request = request
        self._earlier = earlier
        self._owner = whose
        self._id = f"resp_{uuid.uuid4().hex}"  # not the client's: it is a key of the store
        self._created = int(time.time())
        self._items = Items()
        self._message = Message()
        self._thought: int | None = None  # tokens up to the first that was not thinking
        self._numbers = itertools.count()

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._events(stream=self._in_pieces)) as events:
            async for _ in events:
                pass
        return await self._finish()

    @property
    def _in_pieces(self) -> bool:
        """Whether even a whole answer has to be seen as it comes: where thinking ends is counted in tokens."""
        return self._call.cut_short or self._call.thinks

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._events(stream=True)) as events:
            async for made in events:
                if not begun:
                    begun = True
                    opened = self._body("in_progress")
                    made = [
                        {"type": "response.created", "response": opened},
                        {"type": "response.in_progress", "response": opened},
                        *made,
                    ]
                if made:
                    yield b"".join(map(self._sse, made))
        body = await self._finish()
        yield self._sse({"type": f"response.{body['status']}", "response": body})

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that cannot go on."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        body = self._body("failed") | {"error": {"code": code, "message": error.message}}
        return self._sse({"type": "response.failed", "response": body})

    async def _events(self, stream: bool) -> AsyncGenerator[list[Event], None]:
        """Events of output items, a list for each piece of the answer."""
        tokens = 0
        pending: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is held back
        async with aclosing(self._call.pieces(stream)) as pieces:
            async for piece, deltas in pieces:
                made: list[Event] = []
                if self._thought is None and any("reasoning_content" not in delta for delta in deltas):
                    before = tokens if self._items.begun else 0
                    self._thought = before + thinking_tokens(deltas, len(piece.token_ids))
                tokens += len(piece.token_ids)
                pending += self._logprobs(piece)
                for place, delta in enumerate(deltas):
                    self._message.add(delta)
                    last = place == len(deltas) - 1
                    made += self._items.feed(delta, pending if last else [])
                if deltas:
                    pending = []
                yield made
        if self._thought is None:
            self._thought = tokens if self._items.begun else 0
        self._items.add_logprobs(pending)
        yield list(self._items.close("incomplete" if self._cut else "completed"))

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        if not self._request.wants_logprobs or not piece.logprobs:
            return []
        listed = chat_logprobs(piece.logprobs, piece.token_ids, self._request.top_logprobs or 0)["content"]
        return [{**token, "bytes": token["bytes"] or []} for token in listed]

    @property
    def _cut(self) -> bool:
        return self._call.choices[0].finish_reason == "length"

    async def _finish(self) -> dict[str, Any]:
        body = self._body("incomplete" if self._cut else "completed")
        if self._cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        body |= {"output": self._items.done, "usage": _usage(self._call.usage, self._thought or 0)}
        if self._store is not None:
            asked = input_messages(self._request)
            said = {name: value for name, value in self._message.body().items() if value}
            said.pop("reasoning", None)
            messages = [*self._earlier, *asked, {"content": "", **said}]
            await self._store.put(self._id, self._owner, Stored(body, _input_items(self._request), messages))
        return body

    def _body(self, status: str) -> dict[str, Any]:
        request = self._request
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        choice = request.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "temperature": self._drawn(request.temperature, "temperature"),
            "top_p": self._drawn(request.top_p, "top_p"),
            "top_logprobs": request.top_logprobs or 0,
            "text": {"format": {"type": "text"}} | text,
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "tool_choice": "auto"
            if choice is None
            else choice
            if isinstance(choice, str)
            else choice.model_dump(exclude_none=True),
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "store": self._store is not None,
            "metadata": request.metadata or {},
            "user": request.user,
            "safety_identifier": request.safety_identifier,
            "prompt_cache_key": request.prompt_cache_key,
            "usage": None,
        }

    def _drawn(self, asked: float | None, name: str) -> float:
        return self._call.defaults.get(name, 1.0) if asked is None else asked

    def _sse(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": next(self._numbers)}
        return b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(numbered) + b"\n\n"


def thinking_tokens(deltas: Sequence[Mapping[str, Any]], count: int) -> int:
    """Of the `count` tokens of a piece in which thinking ends, those that were thinking: by the share of its text, for
    a piece does not say where its tokens end."""
    lengths = [
        sum(len(delta[key] or "") for delta in deltas if key in delta) for key in ("reasoning_content", "content")
    ]
    if not lengths[0]:
        return 0
    share = round(count * lengths[0] / sum(lengths))
    return max(1, min(share, count - 1 if lengths[1] else count))


def _input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """As GET /v1/responses/{id}/input_items lists them."""
    if isinstance(request.input, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": request.input}]}]
    else:
        items = [item.model_dump(exclude_none=True) for item in request.input]
    return [{"id": f"item_{place}", **item} for place, item in enumerate(items)]


def _usage(usage: Usage, thought: int) -> dict[str, Any]:
    counted = usage.body()
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": counted["total_tokens"],
    }


def page_of(items: list[dict[str, Any]], after: str | None, limit: int, order: str) -> dict[str, Any]:
    """A page of a list. Raises ApiError when `after` names none of them."""
    listed = list(reversed(items)) if order == "desc" else list(items)
    if after is not None:
        names = [item["id"] for item in listed]
        if after not in names:
            raise invalid("after", f"no item has the id {after!r}.")
        listed = listed[names.index(after) + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > limit,
    }
