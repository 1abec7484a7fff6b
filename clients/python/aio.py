"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any

from grpc.aio import AioRpcError
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from clients.python import wire
from clients.python.wire import Chunk, Completion, Message, Prompt, ServerError
from engine.types import SamplingParams

_DEFAULTS = SamplingParams()
_DESCRIBE_S = 5.0


class AsyncClient:
    """Talks to one LLM model and its tokenizer model. One client serves any number of requests at once.

    url: host:port of the server's gRPC. tokenizer: None stands for MODEL_tokenizer, which `nereid add` makes, where the
    server has it, else for `tokenizer`. Every method raises ServerError with the server's sentence.
    """

    def __init__(self, url: str = "localhost:8001", model: str = "demo", tokenizer: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._max_model_len: int | None = None
        self._server = InferenceServerClient(url)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._server.close()

    async def ready(self) -> bool:
        """Whether the model answers; False also when no server listens."""
        return await self._is_ready(self.model)

    def stream(
        self, prompt: Prompt, params: SamplingParams = _DEFAULTS, request_id: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it is made. prompt: text or token ids. Closing the generator cancels the request."""
        return self._responses(wire.generation_inputs(prompt, params, stream=True), request_id)

    async def complete(self, prompt: Prompt, params: SamplingParams = _DEFAULTS, request_id: str = "") -> Completion:
        """The whole answer in one response. Cancelling the awaiting task cancels the request."""
        inputs = wire.generation_inputs(prompt, params, stream=False)
        chunks = [chunk async for chunk in self._responses(inputs, request_id)]
        if not chunks:
            raise ServerError("the server ended the request without an answer", "INTERNAL")
        return wire.joined(chunks)

    async def batch(
        self, prompts: Iterable[Prompt], params: SamplingParams = _DEFAULTS, at_once: int = 64
    ) -> list[Completion]:
        """The answers to all prompts, in their order, `at_once` requests at a time. One failure cancels the others."""
        if at_once < 1:
            raise ValueError(f"at_once must be at least 1, not {at_once}")
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: Prompt) -> Completion:
            async with gate:
                return await self.complete(prompt, params)

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def chat_ids(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """The prompt that the checkpoint's chat template makes of `messages`, as token ids.

        template: tools, continue_final_message, add_generation_prompt and the template's own variables.
        """
        return await self._ids(wire.chat_inputs(messages, template))

    async def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams = _DEFAULTS, **template: Any
    ) -> AsyncGenerator[Chunk, None]:
        """The next message of a chat as it is made. Closing the generator cancels the request."""
        async with aclosing(self.stream(await self._prompt(messages, template), params)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams = _DEFAULTS, **template: Any
    ) -> Completion:
        """The next message of a chat."""
        return await self.complete(await self._prompt(messages, template), params)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._ids(wire.text_inputs(text, add_special_tokens))

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        inputs = wire.ids_inputs(ids, skip_special_tokens)
        try:
            result = await self._server.infer(await self._tokenizer(), inputs)
        except InferenceServerException as error:
            raise wire.server_error(error) from None
        return str(result.as_numpy("text_output").reshape(-1)[0].decode())

    async def _tokenizer(self) -> str:
        if self.tokenizer is None:
            own = f"{self.model}_tokenizer"
            self.tokenizer = own if await self._is_ready(own) else "tokenizer"
        return self.tokenizer

    async def _is_ready(self, model: str) -> bool:
        try:
            return bool(await self._server.is_model_ready(model))
        except InferenceServerException:
            return False

    async def _prompt(self, messages: Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        """The ids of a chat that the model is to answer. One that can only be too long for it is refused before it is
        tokenized, which takes seconds for megabytes."""
        if self._max_model_len is None:
            self._max_model_len = await self._described()
        return await self._ids(wire.chat_inputs(messages, template), self._max_model_len)

    async def _described(self) -> int | None:
        """Tokens that the model holds; None while it does not say, as one that was added before it could."""
        found = None
        call = self._server.stream_infer(self._request(wire.describe_inputs()), stream_timeout=_DESCRIBE_S)
        try:
            with suppress(InferenceServerException, AioRpcError):
                async for result, error in call:
                    found = found if error is not None else wire.max_model_len(result) or found
        finally:
            call.cancel()
        return found

    async def _ids(self, inputs: list[InferInput], context: int | None = None) -> list[int]:
        parameters = None if context is None else {"max_model_len": context}
        try:
            result = await self._server.infer(await self._tokenizer(), inputs, parameters=parameters)
        except InferenceServerException as error:
            raise wire.server_error(error) from None
        return [int(i) for i in result.as_numpy("input_ids").reshape(-1)]

    async def _responses(self, inputs: list[InferInput], request_id: str) -> AsyncGenerator[Chunk, None]:
        call = self._server.stream_infer(self._request(inputs, request_id))
        failure: ServerError | None = None
        try:
            async for result, error in call:
                failure = failure or (wire.failure_of(result) if error is None else wire.server_error(error))
                chunk = None if failure is not None else wire.chunk_of(result)
                if chunk is not None:
                    yield chunk
            # Only now: leaving a call before its end cancels it, and tritonserver 2.51 can crash on a cancellation that
            # meets the end of its request (server issue 8034).
            if failure is not None:
                raise failure
        except InferenceServerException as error:
            raise wire.server_error(error) from None
        except AioRpcError as error:
            raise ServerError(error.details() or str(error), error.code().name) from None
        finally:
            call.cancel()  # changes nothing when the stream is over

    async def _request(self, inputs: list[InferInput], request_id: str = "") -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": self.model, "inputs": inputs, "request_id": request_id}
