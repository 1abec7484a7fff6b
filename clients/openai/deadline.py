"""When a request must have been answered, whoever is slow: a tokenizer, an engine, or the way to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from clients.openai.errors import ApiError, invalid

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """seconds: what the request was given when it came. end: on the monotonic clock."""

    seconds: float
    end: float

    @classmethod
    def of(cls, wanted: float | None, longest_s: float) -> Deadline:
        """From now. Raises ApiError when more is wanted than any request may take."""
        if wanted is not None and wanted > longest_s:
            raise invalid("timeout", f"`timeout` may be at most {longest_s:g} seconds here.")
        seconds = longest_s if wanted is None else wanted
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    async def kept(self, work: Awaitable[T]) -> T:
        """What `work` gives in time. Raises ApiError 504 when it does not."""
        try:
            # Not anyio's: it does not know its own cancellation again behind grpc, which raises one of its own.
            return await asyncio.wait_for(work, self.left)
        except asyncio.TimeoutError:
            raise ApiError(504, f"The request ran past its timeout of {self.seconds:g} s.") from None
