"""Run the generations of one request, side by side, and bring their pieces together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from clients.openai.errors import BackendError
from clients.openai.router import Router
from clients.openai.wire import Generation, Piece

_QUEUE_PIECES = 64
_GRACE_S = 0.25


@dataclass
class Collected:
    """Everything one generation has said so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    finish_reason: str | None = None
    cumulative_logprob: float = 0.0

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs or ())
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.cumulative_logprob = piece.cumulative_logprob
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / max(1, len(self.token_ids))


def relay(
    router: Router, generations: Sequence[Generation], stopped: Collection[int] = ()
) -> AsyncGenerator[Piece, None]:
    """Pieces of all generations as they come. Leaving early cancels all of them; one that fails fails them all.

    Nothing is given out before each generation has said something: a request of which one prompt is refused then still
    fails with its own status, however fast the others are.

    generations: the one at place i has index i. stopped: indices whose generation is to be cancelled; the caller adds
    to it while it handles a piece, and leaves when all of them are in it.
    """
    if len(generations) == 1:
        return router.generate(generations[0])
    return _merge(router, generations, stopped)


async def _merge(
    router: Router, generations: Sequence[Generation], stopped: Collection[int]
) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(_QUEUE_PIECES)
    tasks: list[asyncio.Task[None]] = []
    for generation in generations:
        tasks.append(asyncio.create_task(_feed(router, generation, queue)))
    live = set(range(len(tasks)))
    silent = set(live)
    held: list[Piece] = []
    try:
        while live:
            number, item = await queue.get()
            if number not in live:
                continue
            if isinstance(item, BaseException):
                raise item
            silent.discard(number)
            if item is None:
                live.discard(number)
            else:
                held.append(item)
            if silent:
                continue
            for piece in held:
                if piece.index in stopped:
                    continue
                yield piece
                if piece.index in stopped:
                    live.discard(piece.index)
                    tasks[piece.index].cancel()
            held.clear()
    except BackendError:
        # What failed one mostly fails them all. Cancelling calls that are ending anyway is what older tritonservers
        # crash on (server issue 8034), so they get a moment to end by themselves.
        await asyncio.wait(tasks, timeout=_GRACE_S)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    router: Router,
    generation: Generation,
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]],
) -> None:
    try:
        async with aclosing(router.generate(generation)) as pieces:
            async for piece in pieces:
                await queue.put((generation.index, piece))
        await queue.put((generation.index, None))
    except Exception as error:
        await queue.put((generation.index, error))
