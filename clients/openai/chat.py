"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from clients.openai.constraints import chat_constraint
from clients.openai.deadline import Deadline
from clients.openai.encode import json_response
from clients.openai.errors import invalid, unsupported
from clients.openai.logprobs import Entry, chat_logprobs
from clients.openai.model_forms import ModelForms
from clients.openai.params import check_length, sampling_fields
from clients.openai.prompts import Source, chat_source, encode_text
from clients.openai.reader import reader_of
from clients.openai.relay import relay
from clients.openai.schema import ChatRequest
from clients.openai.shim import Label, Shim
from clients.openai.stream import connected, event, start_stream
from clients.openai.tools import (
    CallArguments,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolParser,
)
from clients.openai.trace import Trace, trace_of
from clients.openai.usage import Usage
from clients.openai.wire import Generation, Piece, Prompt
from engine.types import MAX_PREDICTED_IDS, Constraint

_TO_THE_END = 2**31 - 1  # max_tokens: the engine stops when the context is full


C = TypeVar("C", bound="Choice")


async def chat(shim: Shim, http: Request, request: ChatRequest) -> Response:
    """The answer, or the stream once its first token is there. Raises ApiError, BackendError."""
    trace = trace_of(http)
    trace.name(request.request_id)
    trace.model = request.model
    trace.user = request.safety_identifier or request.user or "-"
    answer = ChatCall(shim, request, trace, Choice)
    if request.stream:
        return await start_stream(http.receive, answer.events())
    async with connected(http.receive):
        body = await answer.whole()
    return json_response(body)


class Choice:
    """One choice of a chat answer: pieces of generated text in, message deltas out."""

    def __init__(self, request: ChatRequest, reader: ToolParser) -> None:
        self._reader = reader
        self._forced = request.forced_tool is not None
        self._one_call = self._forced or request.parallel_tool_calls is False
        self._include_reasoning = request.include_reasoning is not False
        self._num_calls = 0
        self.stopped = False  # a single call is complete: the rest is not wanted
        self.finish_reason: str | None = None

    def feed(self, piece: Piece) -> list[dict[str, Any]]:
        """Deltas of the message that this piece completes."""
        if self.finish_reason is not None:
            return []
        deltas = [] if self.stopped else self._bodies(self._reader.feed(piece.text))
        if piece.finish_reason is not None:
            if not self.stopped:
                deltas += self._bodies(self._reader.finish())
            self.finish_reason = self._reason(piece.finish_reason)
        elif self.stopped:
            self.finish_reason = self._reason("stop")
        return deltas

    def _reason(self, engine: str) -> str:
        if self.stopped:
            engine = "stop"
        return "tool_calls" if engine == "stop" and self._num_calls and not self._forced else engine

    def _bodies(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []
        for delta in deltas:
            if self._one_call and isinstance(delta, CallStart | CallArguments) and delta.index > 0:
                break
            if isinstance(delta, ReasoningDelta):
                if self._include_reasoning:
                    bodies.append({"reasoning_content": delta.text, "reasoning": delta.text})
            elif isinstance(delta, ContentDelta):
                bodies.append({"content": delta.text})
            elif isinstance(delta, CallStart):
                self._num_calls += 1
                function = {"name": delta.name, "arguments": ""}
                call = {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
                bodies.append({"tool_calls": [call]})
            elif isinstance(delta, CallArguments):
                bodies.append({"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]})
        if self._one_call and self._reader.calls_done:
            self.stopped = True
        return bodies


class Message:
    """A choice's deltas put together."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def add(self, delta: dict[str, Any]) -> None:
        self.content.append(delta.get("content") or "")
        self.reasoning.append(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                function = dict(call["function"])
                self.calls.append({"id": call["id"], "type": "function", "function": function})
            else:
                self.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def body(self) -> dict[str, Any]:
        content = "".join(self.content)
        reasoning = "".join(self.reasoning)
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            body["reasoning_content"] = body["reasoning"] = reasoning
        if self.calls:
            body["content"] = content or None
            body["tool_calls"] = self.calls
        return body


class ChatCall(Generic[C]):
    """One chat request on its way through; other APIs that speak of conversations make one as well.

    choice: makes each choice of the answer. choices: there once the conversation is rendered, whose end shows where the
    answer begins. Raises ApiError when the server cannot serve such a request.
    """

    def __init__(
        self, shim: Shim, request: ChatRequest, trace: Trace, choice: Callable[[ChatRequest, ToolParser], C]
    ) -> None:
        if request.active_tools and shim.config.tool_parser == "none":
            raise unsupported("tools", "this server was started with --tool-parser none.")
        shim.check_template(request.chat_template)
        self._info = shim.router.model(request.model)
        self._forms = ModelForms.of(shim.config, self._info)
        self._shim = shim
        self.request = request
        self.label = Label.new("chatcmpl", "chat.completion", request.model, trace.request_id)
        self.trace = trace
        self._deadline = Deadline.of(request.timeout, shim.config.request_timeout_s)
        self.usage = trace.usage = Usage(request.num_choices)
        self._choice = choice
        self.choices: list[C] = []
        self.source = Source(Prompt())
        self._constraint: Constraint | None = None
        self._predicted: list[int] = []

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The model's own sampling, for what the request does not say."""
        return self._shim.defaults(self._info)

    @property
    def thinks(self) -> bool:
        """The answer may begin with thinking."""
        return self._forms.may_think(self.request)

    @property
    def cut_short(self) -> bool:
        """The answer may end before the model does, so it has to be seen as it comes."""
        return self.request.forced_tool is not None or self.request.parallel_tool_calls is False

    async def whole(self) -> dict[str, Any]:
        request = self.request
        count = request.num_choices
        messages = [Message() for _ in range(count)]
        token_ids: list[list[int]] = [[] for _ in range(count)]
        entries: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        prompt_logprobs = None
        async with aclosing(self.pieces(stream=self.cut_short)) as pieces:
            async for piece, deltas in pieces:
                index = piece.index
                for delta in deltas:
                    messages[index].add(delta)
                token_ids[index] += piece.token_ids
                entries[index] += piece.logprobs or ()
                prompt_logprobs = piece.prompt_logprobs or prompt_logprobs
        choices = []
        for index, choice in enumerate(self.choices):
            body: dict[str, Any] = {"index": index, "message": messages[index].body(), "logprobs": None}
            if self.source.echo:
                body["message"]["content"] = self.source.echo + (body["message"]["content"] or "")
            if request.logprobs:
                body["logprobs"] = self._logprobs(entries[index], token_ids[index])
            body["finish_reason"] = choice.finish_reason
            if request.return_token_ids:
                body["token_ids"] = token_ids[index]
            choices.append(body)
        answer = self.label.body(choices) | self._extras() | {"usage": self.usage.body()}
        if request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs
        if request.return_token_ids:
            answer["prompt_token_ids"] = list(self.source.prompt.ids or ())
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        request = self.request
        begun: set[int] = set()
        async with aclosing(self.pieces(stream=True)) as pieces:
            async for piece, deltas in pieces:
                index = piece.index
                first = not begun
                if index not in begun:
                    begun.add(index)
                    deltas.insert(0, {"role": "assistant", "content": self.source.echo})
                finish = self.choices[index].finish_reason
                if not deltas and (finish or request.logprobs or request.return_token_ids or request.continuous_usage):
                    deltas.append({})
                chunks = []
                for place, delta in enumerate(deltas):
                    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                    if place == len(deltas) - 1:
                        choice["finish_reason"] = finish
                        if request.logprobs and piece.logprobs:
                            choice["logprobs"] = self._logprobs(piece.logprobs, piece.token_ids)
                        if request.return_token_ids:
                            choice["token_ids"] = list(piece.token_ids)
                    body = self._chunk([choice])
                    if first and place == 0 and request.return_token_ids:
                        body["prompt_token_ids"] = list(self.source.prompt.ids or ())
                    chunks.append(event(body))
                if chunks:
                    yield b"".join(chunks)
        if request.include_usage:
            yield event(self._chunk([]) | {"usage": self.usage.body()})

    def _logprobs(self, entries: Sequence[Entry], token_ids: Sequence[int]) -> dict[str, Any]:
        request = self.request
        return chat_logprobs(entries, token_ids, request.top_logprobs or 0, bool(request.return_tokens_as_token_ids))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.label.body(choices, "chat.completion.chunk")
        if self.request.continuous_usage:
            body["usage"] = self.usage.body()
        elif self.request.include_usage:
            body["usage"] = None
        return body

    def _extras(self) -> dict[str, Any]:
        return {} if self.request.service_tier is None else {"service_tier": "default"}

    async def pieces(self, stream: bool) -> AsyncGenerator[tuple[Piece, list[dict[str, Any]]], None]:
        """(piece, its deltas), counted; a choice that needs no more is cancelled."""
        generations = await self._deadline.kept(self._generations(stream))
        stopped: set[int] = set()
        async with aclosing(relay(self._shim.router, generations, stopped)) as pieces:
            async for piece in pieces:
                self._shim.account(self.trace, self.usage, piece)
                choice = self.choices[piece.index]
                yield piece, choice.feed(piece)
                if choice.stopped and piece.finish_reason is None:
                    stopped.add(piece.index)
                    if len(stopped) == len(generations):
                        return

    async def _generations(self, stream: bool) -> list[Generation]:
        request, shim = self.request, self._shim
        shim.check_choices(request.num_choices)
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        check_length(self._info, field, request.limit)
        chat_constraint(request, self._forms, "before")  # what is refused is refused before anything is done
        self.source = await chat_source(shim.router, self._info, request, self._forms)
        if request.prediction is not None:
            self._predicted = await encode_text(shim.router, self._info, request.prediction.text, False)
            if len(self._predicted) > MAX_PREDICTED_IDS:
                count = len(self._predicted)
                raise invalid("prediction", f"{count} tokens are predicted; at most {MAX_PREDICTED_IDS} are allowed.")
            self.usage.predict(self._predicted)
        begins = self._forms.begins(request, self.source.end)
        self.choices += [
            self._choice(request, reader_of(request, self._forms, begins, self.source.end))
            for _ in range(request.num_choices)
        ]
        self._constraint = chat_constraint(request, self._forms, begins)
        if self._forms.keeps_special(request) and request.skip_special_tokens is None:
            self.request = request.model_copy(update={"skip_special_tokens": False})
        return [self._generation(choice, stream) for choice in range(1 if request.beams > 1 else request.num_choices)]

    def _generation(self, choice: int, stream: bool) -> Generation:
        request = self.request
        wanted = (request.top_logprobs or 0) if request.logprobs else None
        limit = request.limit
        return Generation(
            model=request.model,
            request_id=f"{self.label.answer_id}-{choice}",
            index=choice,
            prompt=self.source.prompt,
            sampling=sampling_fields(
                request,
                max_tokens=_TO_THE_END if limit is None else limit,
                logprobs=wanted,
                choice=choice,
                constraint=self._constraint,
                predicted=self._predicted,
                defaults=self.defaults,
            ),
            stream=stream,
            deadline=self._deadline.end,
            logprobs=wanted is not None,
            prompt_logprobs=request.prompt_logprobs is not None,
            answers=request.num_choices if request.beams > 1 else 1,
            trace=self.trace.headers,
        )
