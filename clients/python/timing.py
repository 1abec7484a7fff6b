"""When the responses of one stream came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise


class Timing:
    """Starts with its construction. Times are in seconds; before the first response they are None."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._tokens: list[float] = []

    def token(self, count: int = 1) -> None:
        """A response with `count` tokens arrived now."""
        self._tokens += [time.perf_counter()] * count

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return self._tokens[0] - self._start if self._tokens else None

    @property
    def total(self) -> float | None:
        """Time to the last token."""
        return self._tokens[-1] - self._start if self._tokens else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first a second: the pace of the stream, without the wait for its start."""
        if len(self._tokens) < 2:
            return None
        return (len(self._tokens) - 1) / max(self._tokens[-1] - self._tokens[0], 1e-9)

    @property
    def gaps(self) -> list[float]:
        """Time from each token to the next; tokens of one response come at once."""
        return [after - before for before, after in pairwise(self._tokens)]

    def __str__(self) -> str:
        if self.ttft is None:
            return "no tokens"
        pace = f", {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s is not None else ""
        return f"TTFT {self.ttft * 1e3:.1f} ms{pace}, {self.num_tokens} tokens"


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation between the two nearest ranks. values must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
