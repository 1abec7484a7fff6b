"""The client for programs without asyncio: the asynchronous one, on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from clients.python.aio import AsyncClient
from clients.python.wire import Chunk, Completion, Message, Prompt
from engine.types import SamplingParams

T = TypeVar("T")

_DEFAULTS = SamplingParams()


class Client:
    """Like AsyncClient, with ordinary methods and iterators. May be shared between threads."""

    def __init__(self, url: str = "localhost:8001", model: str = "demo", tokenizer: str | None = None) -> None:
        self.model = model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nereid-client", daemon=True)
        self._thread.start()

        async def make() -> AsyncClient:
            return AsyncClient(url, model, tokenizer)

        self._client = self._wait(make())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs and let the connection go."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ready(self) -> bool:
        """Whether the model answers; False also when no server listens."""
        return self._wait(self._client.ready())

    def stream(self, prompt: Prompt, params: SamplingParams = _DEFAULTS, request_id: str = "") -> Iterator[Chunk]:
        """The answer as it is made. prompt: text or token ids. Closing the iterator cancels the request."""
        return self._iterate(lambda: self._client.stream(prompt, params, request_id))

    def complete(self, prompt: Prompt, params: SamplingParams = _DEFAULTS, request_id: str = "") -> Completion:
        """The whole answer in one response."""
        return self._wait(self._client.complete(prompt, params, request_id))

    def batch(
        self, prompts: Iterable[Prompt], params: SamplingParams = _DEFAULTS, at_once: int = 64
    ) -> list[Completion]:
        """The answers to all prompts, in their order, `at_once` requests at a time."""
        return self._wait(self._client.batch(prompts, params, at_once))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams = _DEFAULTS, **template: Any
    ) -> Iterator[Chunk]:
        """The next message of a chat as it is made. Closing the iterator cancels the request."""
        return self._iterate(lambda: self._client.stream_chat(messages, params, **template))

    def chat(self, messages: Sequence[Message], params: SamplingParams = _DEFAULTS, **template: Any) -> Completion:
        """The next message of a chat."""
        return self._wait(self._client.chat(messages, params, **template))

    def chat_ids(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """The prompt that the checkpoint's chat template makes of `messages`, as token ids."""
        return self._wait(self._client.chat_ids(messages, **template))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._wait(self._client.tokenize(text, add_special_tokens))

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._wait(self._client.detokenize(ids, skip_special_tokens))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must not leave the request running there
            future.cancel()
            raise

    def _iterate(self, start: Callable[[], AsyncGenerator[Chunk, None]]) -> Iterator[Chunk]:
        chunks = start()
        taking: asyncio.Task[Chunk | None] | None = None

        async def take() -> Chunk | None:
            nonlocal taking
            taking = asyncio.ensure_future(anext(chunks, None))
            return await taking

        async def leave() -> None:
            if taking is not None and not taking.done():
                taking.cancel()
                await asyncio.wait([taking])
            await chunks.aclose()

        try:
            while (chunk := self._wait(take())) is not None:
                yield chunk
        finally:
            self._wait(leave())
