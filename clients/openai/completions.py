"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from clients.openai.constraints import constraint_of
from clients.openai.deadline import Deadline
from clients.openai.encode import json_response
from clients.openai.logprobs import completion_logprobs, num_characters
from clients.openai.params import check_length, sampling_fields
from clients.openai.prompts import Source, completion_sources
from clients.openai.relay import Collected, relay
from clients.openai.schema import CompletionRequest
from clients.openai.shim import Label, Shim
from clients.openai.stream import connected, event, start_stream
from clients.openai.trace import Trace, trace_of
from clients.openai.usage import Usage
from clients.openai.wire import Generation, Piece


async def complete(shim: Shim, http: Request, request: CompletionRequest) -> Response:
    """The answer, or the stream once its first token is there. Raises ApiError, BackendError."""
    trace = trace_of(http)
    trace.name(request.request_id)
    trace.model, trace.user = request.model, request.user or "-"
    answer = _Answer(shim, request, trace)
    if request.stream:
        return await start_stream(http.receive, answer.events())
    async with connected(http.receive):
        body = await answer.whole()
    return json_response(body)


class _Answer:
    """One completion request on its way through."""

    def __init__(self, shim: Shim, request: CompletionRequest, trace: Trace) -> None:
        self._shim = shim
        self._request = request
        self._label = Label.new("cmpl", "text_completion", request.model, trace.request_id)
        self._trace = trace
        self._deadline = Deadline.of(request.timeout, shim.config.request_timeout_s)
        self._usage = trace.usage = Usage(request.num_candidates)
        self._sources: Sequence[Source] = ()

    @property
    def _as_ids(self) -> bool:
        return bool(self._request.return_tokens_as_token_ids)

    async def whole(self) -> dict[str, Any]:
        request = self._request
        generations = await self._deadline.kept(self._generations(stream=False))
        collected = [Collected() for _ in range(request.num_prompts * request.num_candidates)]
        async with aclosing(relay(self._shim.router, generations)) as pieces:
            async for piece in pieces:
                collected[piece.index].add(self._count(piece))
        choices: list[dict[str, Any]] = []
        for prompt, source in enumerate(self._sources):
            start = prompt * request.num_candidates
            group = collected[start : start + request.num_candidates]
            if request.num_candidates > request.num_choices:
                group = sorted(group, key=lambda c: c.mean_logprob, reverse=True)[: request.num_choices]
            choices += [self._choice(len(choices) + k, source, one) for k, one in enumerate(group)]
        return self._label.body(choices) | {"usage": self._usage.body()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        request, label = self._request, self._label
        generations = await self._deadline.kept(self._generations(stream=True))
        told: dict[int, int] = {}  # characters of the tokens sent, a choice
        async with aclosing(relay(self._shim.router, generations)) as pieces:
            async for piece in pieces:
                index, piece = piece.index, self._count(piece)
                choice: dict[str, Any] = {"index": index, "text": piece.text, "logprobs": None, "finish_reason": None}
                if index not in told:
                    source = self._sources[index // request.num_candidates]
                    told[index] = 0
                    choice["text"] = source.echo + piece.text
                    if request.return_token_ids:
                        choice["prompt_token_ids"] = list(source.prompt.ids or ())
                if request.logprobs is not None and piece.logprobs:
                    choice["logprobs"] = completion_logprobs(
                        piece.logprobs, piece.token_ids, request.logprobs, told[index], as_ids=self._as_ids
                    )
                    told[index] += num_characters(piece.logprobs, piece.token_ids)
                if request.return_token_ids:
                    choice["token_ids"] = list(piece.token_ids)
                if piece.finish_reason is not None:
                    choice["finish_reason"] = "length" if request.max_tokens == 0 else piece.finish_reason
                body = label.body([choice])
                if request.continuous_usage:
                    body["usage"] = self._usage.body()
                elif request.include_usage:
                    body["usage"] = None
                yield event(body)
        if request.include_usage:
            yield event(label.body([]) | {"usage": self._usage.body()})

    async def _generations(self, stream: bool) -> list[Generation]:
        """Candidates of prompt after prompt; they share the prompt's blocks in the engine."""
        request, shim = self._request, self._shim
        info = shim.router.model(request.model)
        shim.check_choices(request.num_prompts * max(request.num_candidates, request.beams))
        check_length(info, "max_tokens", request.max_tokens)
        self._sources = await completion_sources(shim.router, info, request)
        return [
            self._generation(number, source, candidate, stream)
            for number, source in enumerate(self._sources)
            for candidate in range(1 if request.beams > 1 else request.num_candidates)
        ]

    def _generation(self, number: int, source: Source, candidate: int, stream: bool) -> Generation:
        request = self._request
        answers = request.num_choices if request.beams > 1 else 1
        index = number if request.beams > 1 else number * request.num_candidates + candidate
        sampling = sampling_fields(
            request,
            # The engine generates at least one token; for an echo of the prompt alone it is dropped again.
            max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
            logprobs=request.logprobs,
            choice=candidate,
            constraint=constraint_of(request),
            defaults=self._shim.defaults(self._shim.router.model(request.model)),
        )
        if request.echo_logprobs:
            sampling["prompt_logprobs"] = max(request.prompt_logprobs or 0, request.logprobs or 0)
        return Generation(
            model=request.model,
            request_id=f"{self._label.answer_id}-{index}",
            index=index,
            prompt=source.prompt,
            sampling=sampling,
            stream=stream,
            deadline=self._deadline.end,
            logprobs=request.logprobs is not None,
            cumulative=request.num_candidates > request.num_choices,
            prompt_logprobs="prompt_logprobs" in sampling,
            answers=answers,
            trace=self._trace.headers,
        )

    def _count(self, piece: Piece) -> Piece:
        if self._request.max_tokens == 0:
            piece = replace(piece, text="", token_ids=(), logprobs=None)
        self._shim.account(self._trace, self._usage, piece)
        return piece

    def _choice(self, index: int, source: Source, one: Collected) -> dict[str, Any]:
        request = self._request
        choice: dict[str, Any] = {
            "index": index,
            "text": source.echo + one.text,
            "logprobs": self._logprobs(source, one),
            "finish_reason": "length" if request.max_tokens == 0 else one.finish_reason,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = one.prompt_logprobs
        if request.return_token_ids:
            choice["prompt_token_ids"] = list(source.prompt.ids or ())
            choice["token_ids"] = one.token_ids
        return choice

    def _logprobs(self, source: Source, one: Collected) -> dict[str, Any] | None:
        count = self._request.logprobs
        if count is None:
            return None
        if not self._request.echo_logprobs:
            return completion_logprobs(one.logprobs, one.token_ids, count, 0, as_ids=self._as_ids)
        entries = [*(one.prompt_logprobs or ()), *one.logprobs]
        token_ids = [*(source.prompt.ids or ()), *one.token_ids]
        return completion_logprobs(entries, token_ids, count, 0, source.first_token, self._as_ids)
