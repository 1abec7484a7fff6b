"""When to propose: a draft that does not stand costs time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# Wrong proposals in a row, and the most tokens, after which another is tried.
MAX_WRONG, MAX_BACKOFF = 3, 64


class Backoff:
    """Lets one request propose while its proposals are right: after MAX_WRONG wrong ones in a row it waits for more and
    more tokens between two, up to MAX_BACKOFF."""

    __slots__ = ("_guess", "_resumes", "_wrong")

    def __init__(self) -> None:
        self._guess: tuple[int, int] | None = None  # a position, and the token proposed for it
        self._wrong = 0
        self._resumes = 0

    def rests(self, tokens: array[int]) -> bool:
        """Whether nothing is proposed behind `tokens`. They say how the proposal before went."""
        length = len(tokens)
        if self._guess is not None and self._guess[0] < length:
            position, token = self._guess
            self._guess = None
            self._wrong = 0 if tokens[position] == token else self._wrong + 1
            if self._wrong >= MAX_WRONG:
                self._resumes = length + min(1 << self._wrong, MAX_BACKOFF)
        return length < self._resumes

    def proposed(self, tokens: array[int], following: Sequence[int]) -> None:
        """`following` was proposed behind `tokens`."""
        if following and self._guess is None:
            self._guess = (len(tokens), following[0])
